#include "app/score_gradients.h"

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"
#include "io/safetensors.h"
#include "train/micro_batch.h"

namespace octet::app {

void write_gradients(ModelSession& session, const std::vector<Prompt>& prompts, float temperature,
                     const std::string& path) {
  ops::Backend& backend = session.backend();
  loop::Policy& policy = session.policy();
  std::vector<train::TrainSample> samples;
  int64_t num_targets = 0;
  for (const Prompt& prompt : prompts) {
    if (!prompt.error.empty() || prompt.ids.size() < 2) continue;
    samples.emplace_back().ids = prompt.ids;
    num_targets += samples.back().num_targets();
  }
  if (num_targets == 0) {
    fail("--gradients", "a gradient needs a line with two or more tokens, but there is none");
  }

  const model::DecoderLimits& limits = policy.decoder().limits();
  const train::Policy parts{policy.decoder(), policy.head(), policy.pages()};
  const float each = static_cast<float>(-1.0 / static_cast<double>(num_targets));
  for (const auto& [begin, end] :
       train::cut_micro_batches(samples, limits.max_tokens, limits.max_sequences)) {
    throw_if_interrupted();
    train::train_micro_batch(backend, parts, std::span(samples).subspan(begin, end - begin),
                             temperature, [&](auto, std::span<std::vector<float>> gradients) {
                               for (std::vector<float>& g : gradients) std::ranges::fill(g, each);
                               return true;
                             });
  }

  std::vector<io::TensorSpec> specs;
  for (const model::Parameter& parameter : policy.model().weights().parameters()) {
    if (parameter.trained) specs.push_back({parameter.name, tensor::DType::kF32, parameter.shape});
  }
  std::vector<float> values;
  io::write_safetensors(path, std::move(specs), [&](const io::TensorSpec& spec) {
    values.resize(static_cast<size_t>(spec.shape.num_elements()));
    backend.download(policy.model().weights().find(spec.name)->gradient, values.data());
    return tensor::TensorView(values.data(), spec.dtype, spec.shape);
  });
}

}  // namespace octet::app
