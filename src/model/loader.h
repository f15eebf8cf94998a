// Filling a model from a checkpoint, from a seed or from an adapter, and writing it out again.
#pragma once

#include <string>

#include "io/checkpoint.h"
#include "io/fp8_linear.h"
#include "io/peft.h"
#include "model/model.h"

namespace octet::model {

// Streams every tensor of the checkpoint into the model, quantising on the device where the flow
// says so: beside the model itself loading_bytes of device memory are in use, and no tensor is ever
// whole in host memory. Every expected tensor must be there with its shape, finite, and every
// tensor of the file must be used; else Error naming it. FP8 codes of a checkpoint are taken as
// they are where the granularity is the model's, and dequantised where the flow is bf16.
void load_weights(ops::Backend& backend, Model& model, io::Checkpoint& checkpoint);

// Device memory that filling a model takes for its time: some rows, or where a scale belongs to a
// whole tensor the largest one, in F32.
int64_t loading_bytes(Model& model);

// Normal(0, standard_deviation) matrices, unit norms, zero biases, from a seed and each parameter's
// name.
void init_weights(ops::Backend& backend, Model& model, uint64_t seed,
                  double standard_deviation = 0.02);

// A adapters uniform in ±1/√K (PEFT's Kaiming with a = √5), B zero.
void init_adapters(ops::Backend& backend, Model& model, uint64_t seed);
// Error where a module is missing on either side or has another shape.
void load_adapters(ops::Backend& backend, Model& model, const io::PeftAdapter& adapter);

// A Hugging Face folder: config.json and the weights' BF16 rounding (what the forward reads; F32
// under the float32 oracle). Not for frozen FP8 weights: their adapters are the result.
void save_weights(ops::Backend& backend, Model& model, const std::string& folder);
// A PEFT folder in F32, from the masters where they are trained.
void save_adapters(ops::Backend& backend, Model& model, const std::string& folder);

}  // namespace octet::model
