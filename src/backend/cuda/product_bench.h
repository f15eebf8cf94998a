// Timing the products of a model on a device: own kernel, cuBLASLt's heuristic, what a search
// finds.
#pragma once

#include <functional>
#include <span>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/product_choices.h"

namespace octet::cuda {

struct ProductTiming {
  ProductKey key;
  ProductChoice choice;
  // The longer of reading and writing every byte once at the device's copy rate, and of multiplying
  // at its matrix units' rate; microseconds.
  double memory_limit = 0, compute_limit = 0;
};

// Searches for one after another, whatever is known of them, and keeps what it finds.
void measure_products(const CudaOptions& options, std::span<const ProductKey> products,
                      const std::function<void(const ProductTiming&)>& report);

}  // namespace octet::cuda
