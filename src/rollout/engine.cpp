#include "rollout/engine.h"

#include <algorithm>
#include <deque>
#include <memory>

#include "base/error.h"
#include "base/interrupt.h"

namespace octet::rollout {
namespace {

using model::KvStore;
using tensor::DType;
using tensor::TensorView;

// One sample on its way. `ids` is prompt and completion; the first `computed` have their keys and
// values in `pages`. A step computes ids[computed …]; when it reaches the end, the next id is
// drawn.
struct Sequence {
  Completion* completion = nullptr;
  const PromptRequest* request = nullptr;
  int64_t group_size = 1;  // samples to draw from the prompt's last row; 1 once it has forked
  std::vector<int32_t> ids;
  int64_t computed = 0;
  std::vector<int32_t> pages;
  std::unique_ptr<text::IncrementalDecoder> decoder;
  std::string text;

  int64_t num_new() const { return static_cast<int64_t>(ids.size()) - computed; }
};

// The state of one Engine::run.
class Run {
 public:
  Run(ops::Backend& backend, model::Decoder& decoder, model::OutputHead& head, KvStore& pages,
      const text::Tokenizer* tokenizer, const EngineOptions& options, EngineStats& stats,
      TensorView ids, TensorView log_probs, const SamplingOptions& sampling)
      : backend_(backend),
        decoder_(decoder),
        head_(head),
        pages_(pages),
        tokenizer_(tokenizer),
        options_(options),
        stats_(stats),
        ids_(ids),
        log_probs_(log_probs),
        sampling_(sampling) {}
  ~Run() {
    for (std::deque<Sequence>* queue : {&running_, &waiting_}) {
      for (Sequence& sequence : *queue) pages_.release_all(sequence.pages);
    }
  }

  void add(const PromptRequest& request, std::span<Completion> completions) {
    Sequence& sequence = waiting_.emplace_back();
    sequence.request = &request;
    sequence.completion = completions.data();
    sequence.group_size = static_cast<int64_t>(completions.size());
    sequence.ids = request.ids;
  }

  bool done() const { return running_.empty() && waiting_.empty(); }
  int64_t num_finished() const { return num_finished_; }
  int64_t num_tokens() const { return num_tokens_; }

  void step(const Engine::OnFinished& on_finished);

 private:
  struct Part {
    Sequence* sequence;
    int64_t count;  // new tokens in this step
  };

  void admit();
  std::vector<Part> plan();
  bool reserve(Sequence& sequence, int64_t num_tokens);
  bool preempt(const Sequence& keep);
  void draw(Sequence& sequence, int32_t id, float log_prob);
  bool finished(Sequence& sequence, int32_t id);

  ops::Backend& backend_;
  model::Decoder& decoder_;
  model::OutputHead& head_;
  KvStore& pages_;
  const text::Tokenizer* tokenizer_;
  const EngineOptions& options_;
  EngineStats& stats_;
  TensorView ids_, log_probs_;
  const SamplingOptions& sampling_;
  std::deque<Sequence> running_;  // oldest first; references stay valid while appending
  std::deque<Sequence> waiting_;
  int64_t num_finished_ = 0;
  int64_t num_tokens_ = 0;
};

// Starts waiting sequences while there is room for what they have and a page to go on.
void Run::admit() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_num_seqs) {
    const Sequence& next = waiting_.front();
    const auto length = static_cast<int64_t>(next.ids.size());
    const int64_t missing =
        KvStore::pages_for(length + 1) - static_cast<int64_t>(next.pages.size());
    if (!running_.empty() && missing > pages_.num_free()) return;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Makes the pages of the sequence's first num_tokens tokens its own to write from `computed` on.
bool Run::reserve(Sequence& sequence, int64_t num_tokens) {
  const int64_t first_page = sequence.computed / KvStore::kPageSize;
  if (first_page < static_cast<int64_t>(sequence.pages.size()) &&
      pages_.is_shared(sequence.pages[first_page])) {
    const std::optional<int32_t> copy = pages_.allocate();
    if (!copy) return false;
    const auto filled = static_cast<int32_t>(sequence.computed % KvStore::kPageSize);
    if (filled > 0) pages_.copy(backend_, sequence.pages[first_page], *copy, filled);
    pages_.release(sequence.pages[first_page]);
    sequence.pages[first_page] = *copy;
  }
  while (static_cast<int64_t>(sequence.pages.size()) < KvStore::pages_for(num_tokens)) {
    const std::optional<int32_t> page = pages_.allocate();
    if (!page) return false;
    sequence.pages.push_back(*page);
  }
  return true;
}

// Frees pages for `keep`: the youngest running sequence goes back to waiting, or where all others
// are older, the last one waiting gives up the prompt's pages that it holds.
bool Run::preempt(const Sequence& keep) {
  Sequence& youngest = running_.back();
  if (&youngest == &keep) {
    for (auto sequence = waiting_.rbegin(); sequence != waiting_.rend(); ++sequence) {
      if (sequence->pages.empty()) continue;
      pages_.release_all(sequence->pages);
      sequence->computed = 0;
      ++stats_.num_preemptions;
      return true;
    }
    return false;
  }
  pages_.release_all(youngest.pages);
  youngest.computed = 0;
  waiting_.push_front(std::move(youngest));
  running_.pop_back();
  ++stats_.num_preemptions;
  return true;
}

std::vector<Run::Part> Run::plan() {
  const int64_t budget = options_.max_batch_tokens;
  const int64_t max_sequences = decoder_.limits().max_sequences;
  std::vector<Part> parts;
  int64_t used = 0;
  // Oldest first: a preempted sequence is always one that is not planned yet.
  for (size_t i = 0; i < running_.size(); ++i) {
    if (used == budget || static_cast<int64_t>(parts.size()) == max_sequences) break;
    Sequence& sequence = running_[i];
    const int64_t count = std::min(sequence.num_new(), budget - used);
    bool reserved = reserve(sequence, sequence.computed + count);
    while (!reserved && preempt(sequence)) reserved = reserve(sequence, sequence.computed + count);
    if (!reserved) {
      if (parts.empty()) {
        fail("KV pages",
             "a sequence of {} tokens needs more pages than the pool's {}; lower the lengths or "
             "raise the memory limit",
             sequence.ids.size(), pages_.num_pages());
      }
      break;  // what is planned frees pages when it ends
    }
    parts.push_back({&sequence, count});
    used += count;
  }
  return parts;
}

void Run::step(const Engine::OnFinished& on_finished) {
  admit();
  const std::vector<Part> parts = plan();
  std::vector<model::BatchSequence> batch;
  std::vector<int32_t> rows;      // of the hidden states that give a next token
  std::vector<Sequence*> owners;  // of the rows
  int32_t row = 0;
  for (const Part& part : parts) {
    const Sequence& s = *part.sequence;
    batch.push_back({std::span(s.ids).subspan(s.computed, part.count), s.computed, s.pages});
    row += static_cast<int32_t>(part.count);
    if (part.count == s.num_new()) {
      rows.push_back(row - 1);
      owners.push_back(part.sequence);
    }
    const auto prompt = static_cast<int64_t>(s.request->ids.size());
    stats_.num_prompt_tokens += std::max<int64_t>(0, std::min(part.count, prompt - s.computed));
  }
  const TensorView hidden = decoder_.forward(backend_, batch, pages_);
  for (const Part& part : parts) part.sequence->computed += part.count;
  ++stats_.num_steps;

  const auto chunk_rows = static_cast<size_t>(head_.chunk_rows());
  std::vector<ops::SampleParams> params;
  std::vector<int32_t> gathered;
  std::vector<std::pair<Sequence*, int64_t>> draws;  // sequence, sample offset within its group
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t sample = 0; sample < owners[i]->group_size; ++sample) {
      draws.push_back({owners[i], sample});
      gathered.push_back(rows[i]);
    }
  }
  std::vector<int32_t> ids(draws.size());
  std::vector<float> log_probs(draws.size());
  for (size_t begin = 0; begin < draws.size(); begin += chunk_rows) {
    const size_t count = std::min(chunk_rows, draws.size() - begin);
    const auto n = static_cast<int64_t>(count);
    params.clear();
    for (size_t i = begin; i < begin + count; ++i) {
      const Sequence& s = *draws[i].first;
      RngKey key = s.request->key;
      key.sample = static_cast<uint32_t>(s.completion->sample + draws[i].second);
      const auto position = static_cast<uint32_t>(s.ids.size() - s.request->ids.size());
      params.push_back({sampling_.temperature, sampling_.top_p, sampling_.min_p, sampling_.top_k,
                        random_words(key, RngUse::kSample, position)[0]});
    }
    const TensorView logits =
        head_.logits(backend_, hidden, std::span(gathered).subspan(begin, count));
    backend_.sample({.logits = logits,
                     .params = params,
                     .ids = ids_.slice_rows(0, n),
                     .log_probs = log_probs_.slice_rows(0, n),
                     .kept_log_probs = {},
                     .num_known = head_.num_known()});
    backend_.download(ids_.slice_rows(0, n), ids.data() + begin);
    backend_.download(log_probs_.slice_rows(0, n), log_probs.data() + begin);
  }

  // A group whose prompt is done becomes one sequence per sample, all on the prompt's pages. From
  // the last to the first, so that they wait in order.
  for (size_t end = draws.size(); end > 0;) {
    Sequence& leader = *draws[end - 1].first;
    const int64_t group_size = std::exchange(leader.group_size, 1);
    const size_t first = end - static_cast<size_t>(group_size);
    for (int64_t sample = group_size - 1; sample > 0; --sample) {
      Sequence& follower = waiting_.emplace_front();
      follower.request = leader.request;
      follower.completion = leader.completion + sample;
      follower.ids = leader.ids;
      follower.computed = leader.computed;
      follower.pages = leader.pages;
      for (const int32_t page : follower.pages) pages_.add_reference(page);
      draw(follower, ids[first + sample], log_probs[first + sample]);
    }
    draw(leader, ids[first], log_probs[first]);
    end = first;
  }

  for (std::deque<Sequence>* queue : {&running_, &waiting_}) {
    for (Sequence& sequence : *queue) {
      if (!sequence.ids.empty() || sequence.completion == nullptr) continue;
      pages_.release_all(sequence.pages);
      ++num_finished_;
      if (on_finished) on_finished(*sequence.completion);
    }
    std::erase_if(*queue, [](const Sequence& sequence) { return sequence.ids.empty(); });
  }
}

// Takes one drawn id; a sequence that ends is marked by losing its ids.
void Run::draw(Sequence& sequence, int32_t id, float log_prob) {
  Completion& completion = *sequence.completion;
  completion.ids.push_back(id);
  completion.log_probs.push_back(log_prob);
  sequence.ids.push_back(id);
  ++num_tokens_;
  ++stats_.num_sampled_tokens;
  if (finished(sequence, id)) sequence.ids.clear();
}

bool Run::finished(Sequence& sequence, int32_t id) {
  Completion& completion = *sequence.completion;
  if (!sampling_.ignore_eos && std::find(sampling_.stop_ids.begin(), sampling_.stop_ids.end(),
                                         id) != sampling_.stop_ids.end()) {
    completion.finish_reason = FinishReason::kStop;
    return true;
  }
  if (!sampling_.stop.empty()) {
    if (!sequence.decoder) {
      sequence.decoder = std::make_unique<text::IncrementalDecoder>(*tokenizer_);
    }
    sequence.text += sequence.decoder->push(id);
    size_t first = std::string::npos;  // of several, the one that begins first ends the text
    for (const std::string& stop : sampling_.stop) {
      const size_t found = sequence.text.find(stop);
      if (found >= first) continue;
      first = found;
      completion.stop_string = stop;
    }
    if (first != std::string::npos) {
      completion.finish_reason = FinishReason::kStop;
      return true;
    }
  }
  const auto length = static_cast<int64_t>(sequence.ids.size());
  completion.finish_reason = FinishReason::kLength;
  return static_cast<int64_t>(completion.ids.size()) >= sampling_.max_new_tokens ||
         length >= decoder_.limits().max_context;
}

}  // namespace

Engine::Engine(ops::Backend& backend, model::Decoder& decoder, model::OutputHead& head,
               KvStore& pages, const text::Tokenizer* tokenizer, const EngineOptions& options)
    : backend_(backend),
      decoder_(decoder),
      head_(head),
      pages_(pages),
      tokenizer_(tokenizer),
      options_(options) {
  const model::DecoderLimits& limits = decoder.limits();
  options_.max_num_seqs = std::min(options.max_num_seqs, limits.max_sequences);
  options_.max_batch_tokens = options.max_batch_tokens > 0
                                  ? std::min(options.max_batch_tokens, limits.max_tokens)
                                  : limits.max_tokens;
  tensor::Allocator& allocator = backend.allocator();
  sampled_ids_ = allocator.allocate(DType::kI32, {head.chunk_rows()}, "sampling");
  sampled_log_probs_ = allocator.allocate(DType::kF32, {head.chunk_rows()}, "sampling");
}

int64_t Engine::num_bytes(const model::OutputHead& head) {
  return head.chunk_rows() * (tensor::dtype_bytes(DType::kI32) + tensor::dtype_bytes(DType::kF32));
}

std::vector<Completion> Engine::run(std::span<const PromptRequest> requests,
                                    const SamplingOptions& sampling, const Progress& progress,
                                    const OnFinished& on_finished) {
  if (!sampling.stop.empty() && tokenizer_ == nullptr) {
    fail("stop", "stop strings need a tokenizer, but the model's folder has none; use stop ids");
  }
  std::vector<Completion> completions;
  for (size_t index = 0; index < requests.size(); ++index) {
    const PromptRequest& request = requests[index];
    const auto length = static_cast<int64_t>(request.ids.size());
    if (length == 0) fail("prompt", "prompt {} must have at least one token, but has none", index);
    if (length >= decoder_.limits().max_context) {
      fail("prompt",
           "prompt {} must leave room for a new token within {} (max_seq_length), but has {} "
           "tokens; shorten it or raise max_seq_length",
           index, decoder_.limits().max_context, length);
    }
    for (int64_t sample = 0; sample < request.num_samples; ++sample) {
      Completion& completion = completions.emplace_back();
      completion.prompt = static_cast<int64_t>(index);
      completion.sample = sample;
      completion.policy_version = decoder_.model().weights().policy_version();
    }
  }
  if (sampling.max_new_tokens <= 0) return completions;
  Run run(backend_, decoder_, head_, pages_, tokenizer_, options_, stats_,
          sampled_ids_.view(DType::kI32, {head_.chunk_rows()}),
          sampled_log_probs_.view(DType::kF32, {head_.chunk_rows()}), sampling);
  size_t first = 0;
  for (const PromptRequest& request : requests) {
    if (request.num_samples == 0) continue;
    run.add(request, std::span(completions).subspan(first, request.num_samples));
    first += static_cast<size_t>(request.num_samples);
  }
  while (!run.done()) {
    throw_if_interrupted();
    run.step(on_finished);
    if (progress) progress(run.num_finished(), run.num_tokens());
  }
  return completions;
}

}  // namespace octet::rollout
