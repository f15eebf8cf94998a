// Ops with their residual add, quantiser or neighbours in one kernel. Each returns false, with
// nothing queued, where the operands do not suit it: then the caller composes the op of its parts,
// which gives the same bytes.
#pragma once

#include "backend/cuda/context.h"
#include "ops/backend.h"

namespace octet::cuda {

// BF16 operands in rows of 16-byte vectors, codes E4M3 per row or per row and 128 columns.
bool fused_rms_norm(Context& context, const ops::RmsNormArgs& args);
bool fused_gated_activation(Context& context, const ops::GatedActivationArgs& args);
// BF16 heads of a multiple of 16 up to 256, BF16 or E4M3 pages.
bool fused_attention_inputs(Context& context, const ops::AttentionInputsArgs& args);

}  // namespace octet::cuda
