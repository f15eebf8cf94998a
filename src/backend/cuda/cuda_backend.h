// One NVIDIA GPU as a backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace octet::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int capability = 0;   // 90: Hopper
  bool usable = false;  // this build has kernels for it
  std::string why_not;  // where it is not
};

// Which of the architectures "89,90a,100f" has kernels for a device of this compute capability;
// empty: none. Those of 90a run on 9.0 alone, others on their own and later ones of the same major
// number.
std::string architecture_for(int capability, const std::string& architectures);

// The devices that the driver shows; empty, with the reason in `why_none`, where there are none.
std::vector<DeviceInfo> devices(std::string& why_none);

// Memory of a device that no program had taken when this was first asked. Error where the driver
// gives no access.
int64_t free_bytes(int device);

// Which libraries are there at run time, and what happens without them; one line.
std::string describe_libraries();

// Which kernels were found to serve which products best, by device; lines.
std::string describe_choices();

struct CudaOptions {
  int device = 0;
  int64_t memory_limit_bytes = 0;  // 0: none
  bool inexact_products = false;   // rows may depend on the batch: to measure what exactness costs
  bool portable = false;           // on Hopper, too, only the kernels that every architecture has
};

// Throws Error where the device is not there or this build has no kernels for it.
std::unique_ptr<ops::Backend> make_cuda_backend(const CudaOptions& options);

}  // namespace octet::cuda
