#include "backend/cuda/arena.h"

#include <algorithm>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <iterator>

#include "backend/cuda/status.h"
#include "base/error.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

// The driver's functions, found through the runtime: libcuda itself is not linked.
struct Driver {
  PFN_cuGetErrorName_v6000 error_name;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  PFN_cuMemAddressReserve_v10020 reserve;
  PFN_cuMemAddressFree_v10020 free_address;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;

  Driver() {
    const auto load = [](auto& function, const char* name, unsigned version) {
      void* found = nullptr;
      cudaDriverEntryPointQueryResult result{};
      check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result),
            name);
      if (found == nullptr || result != cudaDriverEntryPointSuccess) {
        fail("CUDA driver", "{} is required, but this driver lacks it; update the driver", name);
      }
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    load(error_name, "cuGetErrorName", 6000);
    load(granularity, "cuMemGetAllocationGranularity", 10020);
    load(reserve, "cuMemAddressReserve", 10020);
    load(free_address, "cuMemAddressFree", 10020);
    load(create, "cuMemCreate", 10020);
    load(release, "cuMemRelease", 10020);
    load(map, "cuMemMap", 10020);
    load(unmap, "cuMemUnmap", 10020);
    load(set_access, "cuMemSetAccess", 10020);
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

void check_driver(CUresult status, std::string_view what) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  driver().error_name(status, &name);
  fail(what, "the CUDA driver reports {}", name == nullptr ? "an unknown error" : name);
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  return prop;
}

int64_t used_bytes() {
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "device memory");
  return static_cast<int64_t>(total_bytes - free_bytes);
}

int64_t page_size(int device) {
  const CUmemAllocationProp prop = properties(device);
  size_t bytes = 0;
  check_driver(driver().granularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "device memory");
  return static_cast<int64_t>(bytes);
}

}  // namespace

Arena::Arena(int device, int64_t limit_bytes, cudaStream_t stream)
    : Allocator(limit_bytes, page_size(device)), device_(device), stream_(stream) {
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "device memory");
  device_bytes_ = whole_pages(static_cast<int64_t>(total_bytes));
}

Arena::~Arena() {
  drop(small_);
  for (auto& [data, range] : large_) drop(range);
}

void Arena::reserve(Range& range, int64_t num_bytes) {
  CUdeviceptr base = 0;
  check_driver(driver().reserve(&base, static_cast<size_t>(num_bytes), 0, 0, 0),
               "device addresses");
  range.base = base;
  range.reserved = num_bytes;
}

// `num_bytes` more of physical memory, a multiple of a page.
void Arena::map_more(Range& range, int64_t num_bytes, std::string_view label) {
  charge(num_bytes, label);
  const CUmemAllocationProp prop = properties(device_);
  const auto size = static_cast<size_t>(num_bytes);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = driver().create(&handle, size, &prop, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) {
    refund(num_bytes);
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    fail("memory",
         "{} needs {}, but only {} of the device's {} are free; choose a smaller model, batch or "
         "length",
         label, format_bytes(num_bytes), format_bytes(static_cast<int64_t>(free_bytes)),
         format_bytes(static_cast<int64_t>(total_bytes)));
  }
  check_driver(status, label);
  const CUdeviceptr address = range.base + static_cast<uint64_t>(range.mapped);
  check_driver(driver().map(address, size, 0, handle, 0), label);
  CUmemAccessDesc access{};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver().set_access(address, size, &access, 1), label);
  range.pieces.emplace_back(handle, num_bytes);
  range.mapped += num_bytes;
  device_peak_bytes_ = std::max(device_peak_bytes_, used_bytes());
}

void Arena::unmap_all(Range& range) noexcept {
  if (range.mapped == 0) return;
  cudaStreamSynchronize(stream_);
  uint64_t address = range.base;
  for (const auto& [handle, size] : range.pieces) {
    driver().unmap(address, static_cast<size_t>(size));
    driver().release(handle);
    address += static_cast<uint64_t>(size);
  }
  refund(range.mapped);
  range.pieces.clear();
  range.mapped = 0;
}

void Arena::drop(Range& range) noexcept {
  unmap_all(range);
  if (range.reserved > 0) driver().free_address(range.base, static_cast<size_t>(range.reserved));
  range = {};
}

void* Arena::grow(Range& range, int64_t num_bytes, std::string_view label) {
  if (range.reserved == 0) reserve(range, device_bytes_);
  const int64_t wanted = whole_pages(std::max<int64_t>(num_bytes, 1));
  if (wanted > range.mapped) map_more(range, wanted - range.mapped, label);
  return reinterpret_cast<void*>(range.base);
}

// The offset of the first hole that is large enough, or of the end.
int64_t Arena::take_small(int64_t num_bytes, std::string_view label) {
  for (auto hole = small_holes_.begin(); hole != small_holes_.end(); ++hole) {
    const auto [offset, size] = *hole;
    if (size < num_bytes) continue;
    small_holes_.erase(hole);
    if (size > num_bytes) small_holes_[offset + num_bytes] = size - num_bytes;
    return offset;
  }
  grow(small_, small_end_ + num_bytes, label);
  return std::exchange(small_end_, small_end_ + num_bytes);
}

void* Arena::acquire(int64_t num_bytes, std::string_view label) {
  void* data = nullptr;
  if (is_small(num_bytes)) {
    const int64_t offset = take_small(aligned(num_bytes), label);
    data = reinterpret_cast<char*>(small_.base) + offset;
  } else {
    Range range;
    reserve(range, whole_pages(num_bytes));
    try {
      map_more(range, range.reserved, label);
    } catch (...) {
      drop(range);
      throw;
    }
    data = reinterpret_cast<void*>(range.base);
    large_.emplace(data, std::move(range));
  }
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(num_bytes), stream_), label);
  return data;
}

void Arena::release(void* data, int64_t num_bytes, bool) noexcept {
  if (!is_small(num_bytes)) {
    const auto found = large_.find(data);
    drop(found->second);
    large_.erase(found);
    return;
  }
  // The stream may still use it; whoever gets it next uses the same stream.
  int64_t begin = static_cast<char*>(data) - reinterpret_cast<char*>(small_.base);
  int64_t end = begin + aligned(num_bytes);
  auto next = small_holes_.lower_bound(begin);
  if (next != small_holes_.end() && next->first == end) {
    end += next->second;
    next = small_holes_.erase(next);
  }
  if (next != small_holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      small_holes_.erase(before);
    }
  }
  if (end == small_end_) {
    small_end_ = begin;
  } else {
    small_holes_[begin] = end - begin;
  }
}

void Arena::unmap(void* data, int64_t num_bytes) {
  if (!is_small(num_bytes)) unmap_all(large_.at(data));
}

void Arena::map(void* data, int64_t num_bytes, std::string_view label) {
  if (!is_small(num_bytes)) map_more(large_.at(data), whole_pages(num_bytes), label);
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(num_bytes), stream_), label);
}

}  // namespace octet::cuda
