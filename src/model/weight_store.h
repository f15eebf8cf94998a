// The one copy of the weights. Rollout, scoring and training read the same parameters; an optimiser
// step rewrites them in place through `refresh`.
#pragma once

#include <deque>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "model/precision.h"
#include "ops/backend.h"

namespace octet::model {

enum class ParameterKind { kEmbedding, kHead, kNorm, kBias, kLinear, kLora };

// One named tensor and the forms of it that the flow needs.
//   master     F32; of trained parameters (and of every one in the float32 oracle)
//   dense      BF16; what the forward reads, unless quantised (the oracle reads the master)
//   quantized  E4M3 codes with scales; of linear weights in the FP8 flows
//   row_scales F32 [rows]; of weights with one scale: that scale for each row
//   gradient   F32; of trained parameters
struct Parameter {
  std::string name;  // as in the checkpoint, or in a PEFT file
  tensor::Shape shape;
  ParameterKind kind = ParameterKind::kLinear;
  bool trained = false;

  tensor::TensorView master;
  tensor::TensorView dense;
  tensor::QuantizedView quantized;
  tensor::TensorView row_scales;
  tensor::TensorView gradient;

  // What products read. The forward takes one scale as a scale for each row, which is the same
  // arithmetic, so that the weights of a group are one matrix in every granularity.
  ops::Weight weight() const {
    return quantized.empty() ? ops::Weight{dense, {}} : ops::Weight{{}, quantized};
  }
  ops::Weight forward_weight() const {
    if (row_scales.empty()) return weight();
    return {{}, {quantized.codes, row_scales, tensor::Granularity::kRow}};
  }

 private:
  friend class WeightStore;
  tensor::Buffer master_buffer_, dense_buffer_, gradient_buffer_, scale_buffer_;
};

// Memory of linear weights [rows, K] that read one input: what the forward reads of them lies side
// by side, in the order in which they are added.
struct WeightGroup {
  tensor::Buffer elements, scales;
  int64_t elements_used = 0, scales_used = 0;
};

class WeightStore {
 public:
  WeightStore(tensor::Allocator& allocator, const Precision& precision);

  // Memory for linear weights of so many rows each; add them all, in this order.
  WeightGroup& add_group(std::initializer_list<int64_t> rows, int64_t columns);
  // Allocates the forms of a new parameter; contents are zero. References stay valid. A linear
  // weight lies in `group`, or by itself.
  Parameter& add(std::string name, tensor::Shape shape, ParameterKind kind, bool trained,
                 WeightGroup* group = nullptr);

  Parameter* find(std::string_view name);
  std::deque<Parameter>& parameters() { return parameters_; }
  const Precision& precision() const { return precision_; }

  // Sets a parameter, or its rows from `first_row` on, from F32 or BF16 values in the backend's
  // memory ([rows, …], contiguous): the master where there is one, then every form the forward
  // reads. Rows come in multiples of row_granule, but for the last.
  void assign(ops::Backend& backend, Parameter& parameter, const tensor::TensorView& values,
              int64_t first_row = 0);
  // Rows whose quantised form depends on each other: 1, 128, or all.
  static int64_t row_granule(const Parameter& parameter);
  // From codes and scales (host memory), of a quantised parameter without a master.
  void assign_codes(ops::Backend& backend, Parameter& parameter, const void* codes,
                    const float* scales);
  // Rebuilds what the forward reads from the master's BF16 rounding; counts a new policy version.
  void refresh(ops::Backend& backend);

  // Counts the refreshes: trajectories and KV pages carry the version that made them.
  int64_t policy_version() const { return policy_version_; }
  void set_policy_version(int64_t version) { policy_version_ = version; }

 private:
  void rebuild(ops::Backend& backend, const Parameter& parameter, const tensor::TensorView& values,
               int64_t first_row);
  void spread_scale(ops::Backend& backend, const Parameter& parameter);

  tensor::Allocator& allocator_;
  Precision precision_;
  std::deque<Parameter> parameters_;
  std::deque<WeightGroup> groups_;
  std::unordered_map<std::string, Parameter*> by_name_;
  int64_t policy_version_ = 0;
};

}  // namespace octet::model
