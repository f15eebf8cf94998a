// Rotary position embedding, Su et al., arXiv 2104.09864, in the "rotate half" pairing of Hugging
// Face: (i, i + D/2).
#pragma once

#include "tensor/tensor.h"

namespace octet::ops {

//   y[i]       = x[i] cos − x[i + D/2] sin
//   y[i + D/2] = x[i + D/2] cos + x[i] sin        (F32, rounded once)
// x, y [T, heads, D] (first axis may be strided, y may be x); positions [T] I32; table [P, D] F32:
// row p holds cos (D/2) then sin (D/2) of position p. `inverse` rotates back: the gradient.
struct RopeArgs {
  tensor::TensorView x;
  tensor::TensorView positions;
  tensor::TensorView table;
  tensor::TensorView y;
  bool inverse = false;
};

}  // namespace octet::ops
