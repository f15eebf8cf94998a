// Low-rank adapters, Hu et al., arXiv 2106.09685: y = W x + s · B (A x), s = alpha / r (or alpha /
// √r, rank-stabilised). They live beside the weights and are never merged while running.
#pragma once

#include <string>

#include "io/peft.h"
#include "model/weight_store.h"

namespace octet::model {

// The adapter of one linear layer; a [r, K], b [N, r] in the weight store under PEFT's names.
struct LoraPair {
  Parameter* a = nullptr;
  Parameter* b = nullptr;
  float scale = 1.0f;

  bool empty() const { return a == nullptr; }
  int64_t rank() const { return a->shape[0]; }
};

// PEFT's key of a module's A or B: "base_model.model.{module}.lora_A.weight".
std::string lora_key(const std::string& module, bool b);

}  // namespace octet::model
