#include "model/scoring.h"

#include <algorithm>

#include "base/error.h"

namespace octet::model {
namespace {

// The pages of one sequence, given back whatever happens.
class HeldPages {
 public:
  explicit HeldPages(KvStore& store) : store_(store) {}
  HeldPages(HeldPages&& other) noexcept
      : store_(other.store_), pages_(std::exchange(other.pages_, {})) {}
  ~HeldPages() { store_.release_all(pages_); }

  void reserve_tokens(int64_t num_tokens) {
    while (static_cast<int64_t>(pages_.size()) < KvStore::pages_for(num_tokens)) {
      const std::optional<int32_t> page = store_.allocate();
      if (!page) {
        fail("KV pages",
             "a sequence of {} tokens needs {} pages, but only {} of {} are free; lower "
             "max_seq_length or raise the memory limit",
             num_tokens, KvStore::pages_for(num_tokens), pages_.size(), store_.num_pages());
      }
      pages_.push_back(*page);
    }
  }
  std::span<const int32_t> pages() const { return pages_; }

 private:
  KvStore& store_;
  std::vector<int32_t> pages_;
};

struct Progress {
  const ScoringRequest* request;
  TokenScores* scores;
  int64_t done = 0;  // ids that have gone through the decoder
  HeldPages pages;
};

}  // namespace

std::vector<TokenScores> score_sequences(ops::Backend& backend, Decoder& decoder, OutputHead& head,
                                         KvStore& pages, std::span<const ScoringRequest> requests,
                                         float temperature, const ForwardMode& mode,
                                         int64_t max_tokens, int64_t num_top) {
  const DecoderLimits& limits = decoder.limits();
  if (max_tokens <= 0) max_tokens = limits.max_tokens;
  max_tokens = std::min(max_tokens, limits.max_tokens);
  std::vector<TokenScores> results(requests.size());
  std::vector<Progress> active;
  size_t next = 0;
  while (next < requests.size() || !active.empty()) {
    // Fill one call: what is under way first, then new sequences while tokens and pages last.
    std::vector<BatchSequence> batch;
    std::vector<int32_t> rows, targets;
    std::vector<std::pair<Progress*, std::pair<int64_t, int64_t>>>
        parts;  // scored ids [begin, end)
    int64_t free_tokens = max_tokens;
    int64_t used_tokens = 0;
    while (next < requests.size() && static_cast<int64_t>(active.size()) < limits.max_sequences) {
      const ScoringRequest& request = requests[next];
      const auto length = static_cast<int64_t>(request.ids.size());
      if (length > limits.max_context) {
        fail("score", "a sequence must have at most {} tokens (max_seq_length), but has {}",
             limits.max_context, length);
      }
      int64_t waiting = 0;
      for (const Progress& p : active) {
        waiting += static_cast<int64_t>(p.request->ids.size()) - p.done;
      }
      const bool fits = KvStore::pages_for(length) <= pages.num_free();
      if (!active.empty() && (waiting >= max_tokens || !fits)) break;
      if (length == 0) {
        ++next;
        continue;
      }
      active.push_back({&request, &results[next], 0, HeldPages(pages)});
      active.back().pages.reserve_tokens(length);
      ++next;
    }
    for (Progress& p : active) {
      const auto length = static_cast<int64_t>(p.request->ids.size());
      const int64_t count = std::min(free_tokens, length - p.done);
      if (count == 0) break;
      batch.push_back({p.request->ids.subspan(p.done, count), p.done, p.pages.pages()});
      // Row r of this part predicts id done + r + 1.
      const int64_t end = length + (p.request->last_entropy ? 1 : 0);
      const int64_t first = std::max(p.request->first_target, p.done + 1);
      const int64_t last = std::min(end, p.done + count + 1);
      for (int64_t target = first; target < last; ++target) {
        rows.push_back(static_cast<int32_t>(used_tokens + target - 1 - p.done));
        targets.push_back(target < length ? p.request->ids[target] : -1);
      }
      parts.push_back({&p, {first, std::max(first, last)}});
      p.done += count;
      free_tokens -= count;
      used_tokens += count;
    }
    if (batch.empty()) break;
    const tensor::TensorView hidden = decoder.forward(backend, batch, pages, mode);
    const TokenScores scores = head.score(backend, hidden, rows, targets, temperature, num_top);
    size_t offset = 0;
    for (const auto& [progress, range] : parts) {
      const auto length = static_cast<int64_t>(progress->request->ids.size());
      for (int64_t target = range.first; target < range.second; ++target, ++offset) {
        if (target < length) progress->scores->log_probs.push_back(scores.log_probs[offset]);
        progress->scores->entropies.push_back(scores.entropies[offset]);
        const auto top = scores.top.begin() + static_cast<int64_t>(offset) * num_top;
        progress->scores->top.insert(progress->scores->top.end(), top, top + num_top);
      }
    }
    // Whole sequences stand at the front: they were served in order.
    size_t finished = 0;
    while (finished < active.size() &&
           active[finished].done == static_cast<int64_t>(active[finished].request->ids.size())) {
      ++finished;
    }
    std::vector<Progress> remaining;
    for (size_t i = finished; i < active.size(); ++i) remaining.push_back(std::move(active[i]));
    active = std::move(remaining);
  }
  return results;
}

}  // namespace octet::model
