// The one place that names a backend.
#pragma once

#include <memory>
#include <string>

#include "app/arguments.h"
#include "backend/cpu/isa.h"
#ifdef OCTET_CUDA
#include "backend/cuda/cuda_backend.h"
#endif
#include "loop/config.h"
#include "ops/backend.h"

namespace octet::app {

// What a training config says about the device.
DeviceArguments device_arguments(const loop::RunSection& run);

#ifdef OCTET_CUDA
// What make_backend would give the CUDA backend; UsageError where it would take the CPU.
cuda::CudaOptions cuda_options(const DeviceArguments& arguments);
#endif

// Throws UsageError for a device or an instruction set that is not there.
std::unique_ptr<ops::Backend> make_backend(const DeviceArguments& arguments);

// The instruction set that make_backend would take; the same errors.
cpu::Isa cpu_isa(const DeviceArguments& arguments);

// Whether make_backend would take a CUDA device.
bool uses_cuda(const DeviceArguments& arguments);

// Bytes the backend may use: what was asked for, or what the machine has; 0: unknown.
int64_t memory_limit(const DeviceArguments& arguments);
// What to advise where it is too little.
inline constexpr const char* kMoreMemory = "a higher --device-memory-limit or another --device";

// Lines "label: value" on what make_backend would choose, and why.
std::string describe_device(const DeviceArguments& arguments);

}  // namespace octet::app
