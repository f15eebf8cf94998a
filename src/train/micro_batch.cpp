#include "train/micro_batch.h"

#include "base/error.h"

namespace octet::train {

using model::KvStore;
using model::TokenScores;

std::vector<std::pair<size_t, size_t>> cut_micro_batches(std::span<const TrainSample> samples,
                                                         int64_t max_tokens,
                                                         int64_t max_sequences) {
  std::vector<std::pair<size_t, size_t>> ranges;
  size_t begin = 0;
  int64_t tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto length = static_cast<int64_t>(samples[i].ids.size());
    const bool full =
        tokens + length > max_tokens || static_cast<int64_t>(i - begin) == max_sequences;
    if (i > begin && full) {
      ranges.push_back({begin, i});
      begin = i;
      tokens = 0;
    }
    tokens += length;
  }
  if (begin < samples.size()) ranges.push_back({begin, samples.size()});
  return ranges;
}

void train_micro_batch(ops::Backend& backend, const Policy& policy,
                       std::span<const TrainSample> samples, float temperature,
                       const LossFunction& loss) {
  std::vector<std::vector<int32_t>> pages(samples.size());
  struct Release {
    KvStore& store;
    std::vector<std::vector<int32_t>>& pages;
    ~Release() {
      for (std::vector<int32_t>& list : pages) store.release_all(list);
    }
  } release{policy.pages, pages};

  std::vector<model::BatchSequence> batch;
  std::vector<int32_t> rows, targets;
  int64_t num_tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const TrainSample& sample = samples[i];
    const auto length = static_cast<int64_t>(sample.ids.size());
    while (static_cast<int64_t>(pages[i].size()) < KvStore::pages_for(length)) {
      const std::optional<int32_t> page = policy.pages.allocate();
      if (!page) {
        fail("KV pages",
             "a micro-batch of {} tokens needs more pages than the pool's {}; lower "
             "train.micro_batch_tokens",
             num_tokens + length, policy.pages.num_pages());
      }
      pages[i].push_back(*page);
    }
    batch.push_back({sample.ids, 0, pages[i]});
    for (int64_t target = sample.first_target; target < length; ++target) {
      rows.push_back(static_cast<int32_t>(num_tokens + target - 1));
      targets.push_back(sample.ids[target]);
    }
    num_tokens += length;
  }

  const tensor::TensorView hidden =
      policy.decoder.forward(backend, batch, policy.pages, {.save = true});
  const TokenScores all = policy.head.score(backend, hidden, rows, targets, temperature);
  std::vector<TokenScores> scores(samples.size());
  std::vector<std::vector<float>> gradients(samples.size());
  size_t offset = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto count = static_cast<size_t>(samples[i].num_targets());
    const auto slice = [&](const std::vector<float>& values) {
      return std::vector<float>(values.begin() + offset, values.begin() + offset + count);
    };
    scores[i] = {slice(all.log_probs), slice(all.entropies)};
    gradients[i].assign(count, 0.0f);
    offset += count;
  }
  if (!loss(scores, gradients)) return;

  std::vector<float> d_log_probs;
  for (const std::vector<float>& gradient : gradients) {
    d_log_probs.insert(d_log_probs.end(), gradient.begin(), gradient.end());
  }
  const tensor::TensorView d_hidden = policy.decoder.d_hidden();
  policy.head.backward(backend, hidden, rows, targets, temperature, d_log_probs, {}, d_hidden);
  policy.decoder.backward(backend, d_hidden, policy.pages);
}

}  // namespace octet::train
