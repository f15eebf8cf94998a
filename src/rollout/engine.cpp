#include "rollout/engine.h"

#include <algorithm>
#include <bit>
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
// drawn. Until that id is fetched, a −1 may stand for it in `ids`.
struct Sequence {
  Completion* completion = nullptr;
  const PromptRequest* request = nullptr;
  int64_t group_size = 1;  // samples to draw from the prompt's last row; 1 once it has forked
  std::vector<int32_t> ids;
  int64_t computed = 0;
  std::vector<int32_t> pages;
  int32_t sampled_row = -1;  // ≥ 0: where the step under way leaves the last id
  bool finished = false;
  std::unique_ptr<text::IncrementalDecoder> decoder;
  std::string text;

  int64_t num_new() const { return static_cast<int64_t>(ids.size()) - computed; }
  int64_t num_drawn() const { return static_cast<int64_t>(ids.size() - request->ids.size()); }
};

// By prompt, then sample.
bool is_older(const Sequence* a, const Sequence* b) { return a->completion < b->completion; }

constexpr int32_t kPlaceholder = -1;

// The state of one Engine::run.
class Run {
 public:
  Run(ops::Backend& backend, model::Decoder& decoder, model::OutputHead& head, KvStore& pages,
      const text::Tokenizer* tokenizer, const EngineOptions& options, EngineStats& stats,
      const TensorView& sampled, const SamplingOptions& sampling,
      const Engine::OnFinished& on_finished)
      : backend_(backend),
        decoder_(decoder),
        head_(head),
        pages_(pages),
        tokenizer_(tokenizer),
        options_(options),
        stats_(stats),
        sampled_(sampled),
        max_draws_(sampled.shape[0] / 2),
        sampling_(sampling),
        on_finished_(on_finished) {}
  ~Run() {
    for (Sequence& sequence : sequences_) pages_.release_all(sequence.pages);
  }

  void add(const PromptRequest& request, std::span<Completion> completions) {
    Sequence& sequence = sequences_.emplace_back();
    sequence.request = &request;
    sequence.completion = completions.data();
    sequence.group_size = static_cast<int64_t>(completions.size());
    sequence.ids = request.ids;
    waiting_.push_back(&sequence);
  }

  bool done() const { return running_.empty() && waiting_.empty() && !under_way_.is_queued; }
  int64_t num_finished() const { return num_finished_; }
  int64_t num_tokens() const { return num_tokens_; }

  void step();

 private:
  struct Part {
    Sequence* sequence;
    int64_t count;  // new tokens in this step
  };
  // What comes of a queued step. Its draws have room on the device for `max_draws_` at a time: the
  // ids of a piece, then their log-probabilities; `results` has the same for piece after piece.
  struct Step {
    bool is_queued = false;
    int64_t num_prompt_tokens = 0;
    std::vector<Sequence*> draws;
    std::vector<int32_t> results;
    int64_t ticket = 0;  // of the last piece
  };

  void admit();
  void plan();
  bool reserve(Sequence& sequence, int64_t num_tokens);
  bool preempt(const Sequence& keep);
  void copy_pages();
  void queue();
  void fork(Sequence& leader);
  void sample(const TensorView& hidden);
  void sample_chunk(const TensorView& hidden, int64_t first_draw, const TensorView& ids,
                    const TensorView& log_probs);
  void fetch();
  void draw(Sequence& sequence, int32_t id, float log_prob);
  bool finished(Sequence& sequence, int32_t id);
  bool is_full(const Sequence& sequence) const {
    return sequence.num_drawn() >= sampling_.max_new_tokens ||
           static_cast<int64_t>(sequence.ids.size()) >= decoder_.limits().max_context;
  }

  ops::Backend& backend_;
  model::Decoder& decoder_;
  model::OutputHead& head_;
  KvStore& pages_;
  const text::Tokenizer* tokenizer_;
  const EngineOptions& options_;
  EngineStats& stats_;
  TensorView sampled_;  // [2 max_draws_] I32
  int64_t max_draws_;
  const SamplingOptions& sampling_;
  const Engine::OnFinished& on_finished_;
  std::deque<Sequence> sequences_;  // all of them: they stay where they are
  std::vector<Sequence*> running_;  // oldest first
  std::deque<Sequence*> waiting_;   // oldest first
  Step under_way_, next_;           // queued before this step, and in it
  int64_t num_finished_ = 0;
  int64_t num_tokens_ = 0;
  // Of the step that is built; kept for their memory.
  std::vector<Part> parts_;
  std::vector<ops::KvPageCopy> copies_;
  std::vector<model::BatchSequence> batch_;
  std::vector<int32_t> rows_;  // of the hidden states, one for each draw
  std::vector<ops::SampleParams> params_;
};

// Starts waiting sequences while there is room for what they have and a page to go on.
void Run::admit() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_num_seqs) {
    Sequence* next = waiting_.front();
    const auto length = static_cast<int64_t>(next->ids.size());
    const int64_t missing =
        KvStore::pages_for(length + 1) - static_cast<int64_t>(next->pages.size());
    if (!running_.empty() && missing > pages_.num_free()) return;
    running_.insert(std::ranges::upper_bound(running_, next, is_older), next);
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
    if (filled > 0) copies_.push_back({sequence.pages[first_page], *copy, filled});
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
  Sequence* youngest = running_.back();
  if (youngest == &keep) {
    const auto holder = std::find_if(waiting_.rbegin(), waiting_.rend(),
                                     [](const Sequence* s) { return !s->pages.empty(); });
    if (holder == waiting_.rend()) return false;
    youngest = *holder;
  } else {
    running_.pop_back();
    waiting_.insert(std::ranges::upper_bound(waiting_, youngest, is_older), youngest);
  }
  pages_.release_all(youngest->pages);
  youngest->computed = 0;
  ++stats_.num_preemptions;
  return true;
}

// Chooses the parts of the next step; none where nothing runs.
void Run::plan() {
  const int64_t max_sequences = decoder_.limits().max_sequences;
  int64_t left = options_.max_batch_tokens;
  parts_.clear();
  // Oldest first: a preempted sequence is always one that is not planned yet.
  for (size_t i = 0; i < running_.size(); ++i) {
    if (left == 0 || static_cast<int64_t>(parts_.size()) == max_sequences) break;
    Sequence& sequence = *running_[i];
    const int64_t count = std::min(sequence.num_new(), left);
    bool reserved = reserve(sequence, sequence.computed + count);
    if (!reserved) copy_pages();  // before any page changes hands
    if (!reserved && under_way_.is_queued) {
      fetch();  // what has ended gives back its pages, and every id is known
      return plan();
    }
    while (!reserved && preempt(sequence)) reserved = reserve(sequence, sequence.computed + count);
    if (!reserved) {
      if (parts_.empty()) {
        fail("KV pages",
             "a sequence of {} tokens needs more pages than the pool's {}; lower the lengths or "
             "raise the memory limit",
             sequence.ids.size(), pages_.num_pages());
      }
      break;  // what is planned frees pages when it ends
    }
    parts_.push_back({&sequence, count});
    left -= count;
  }
  copy_pages();
}

void Run::copy_pages() {
  if (!copies_.empty()) pages_.copy(backend_, copies_);
  copies_.clear();
}

void Run::step() {
  admit();
  plan();
  if (!parts_.empty()) queue();
  fetch();
  std::swap(under_way_, next_);
  const bool look_ahead = options_.look_ahead.value_or(backend_.is_asynchronous());
  if (!look_ahead || std::ssize(under_way_.draws) > max_draws_) fetch();
}

// Queues the planned step. Whatever its ids will be, the lengths are known, so the next step can be
// planned.
void Run::queue() {
  batch_.clear();
  rows_.clear();
  int64_t num_rows = 0;
  for (const auto& [sequence, count] : parts_) {
    Sequence& s = *sequence;
    batch_.push_back(
        {std::span(s.ids).subspan(s.computed, count), s.computed, s.pages, s.sampled_row});
    num_rows += count;
    if (count == s.num_new()) {
      rows_.insert(rows_.end(), static_cast<size_t>(s.group_size),
                   static_cast<int32_t>(num_rows - 1));
    }
    const auto prompt = static_cast<int64_t>(s.request->ids.size());
    next_.num_prompt_tokens += std::max<int64_t>(0, std::min(count, prompt - s.computed));
  }
  const auto num_known = static_cast<int64_t>(under_way_.draws.size());
  const TensorView hidden =
      decoder_.forward(backend_, batch_, pages_, {},
                       num_known > 0 ? sampled_.slice_rows(0, num_known) : TensorView());
  for (const auto& [sequence, count] : parts_) {
    sequence->computed += count;
    sequence->sampled_row = -1;
    if (sequence->num_new() == 0) fork(*sequence);
  }
  sample(hidden);
  next_.is_queued = true;
  // Those ended by their length go now: what writes to their pages next comes after this step.
  std::erase_if(running_, [&](Sequence* s) {
    if (!is_full(*s)) return false;
    pages_.release_all(s->pages);
    return true;
  });
}

// Draws from a sequence's last row. A group whose prompt is done becomes one sequence per sample,
// all on the prompt's pages.
void Run::fork(Sequence& leader) {
  const int64_t group_size = std::exchange(leader.group_size, 1);
  leader.ids.push_back(kPlaceholder);
  for (int64_t sample = 0; sample < group_size; ++sample) {
    Sequence& s = sample == 0 ? leader : sequences_.emplace_back();
    s.sampled_row = static_cast<int32_t>(next_.draws.size());
    next_.draws.push_back(&s);
    if (sample == 0) continue;
    s.request = leader.request;
    s.completion = leader.completion + sample;
    s.ids = leader.ids;
    s.computed = leader.computed;
    if (is_full(s)) continue;
    s.pages = leader.pages;
    for (const int32_t page : s.pages) pages_.add_reference(page);
    waiting_.insert(std::ranges::upper_bound(waiting_, &s, is_older), &s);
  }
}

void Run::sample(const TensorView& hidden) {
  const auto total = std::ssize(next_.draws);
  next_.results.resize(static_cast<size_t>(2 * total));
  for (int64_t begin = 0; begin < total; begin += max_draws_) {
    const int64_t count = std::min(max_draws_, total - begin);
    const TensorView log_probs(sampled_.as<int32_t>() + count, DType::kF32, {count});
    for (int64_t first = 0; first < count; first += head_.chunk_rows()) {
      const int64_t n = std::min(head_.chunk_rows(), count - first);
      sample_chunk(hidden, begin + first, sampled_.slice_rows(first, n),
                   log_probs.slice_rows(first, n));
    }
    next_.ticket = backend_.begin_download(sampled_.slice_rows(0, 2 * count));
    if (begin + count < total) {
      backend_.end_download(next_.ticket, next_.results.data() + 2 * begin);
    }
  }
}

void Run::sample_chunk(const TensorView& hidden, int64_t first_draw, const TensorView& ids,
                       const TensorView& log_probs) {
  const auto count = static_cast<size_t>(ids.shape[0]);
  params_.clear();
  for (size_t i = 0; i < count; ++i) {
    const Sequence& s = *next_.draws[static_cast<size_t>(first_draw) + i];
    RngKey key = s.request->key;
    key.sample = static_cast<uint32_t>(s.completion->sample);
    const auto position = static_cast<uint32_t>(s.num_drawn() - 1);
    params_.push_back({sampling_.temperature, sampling_.top_p, sampling_.min_p, sampling_.top_k,
                       random_words(key, RngUse::kSample, position)[0]});
  }
  backend_.sample(
      {.logits = head_.logits(backend_, hidden,
                              std::span(rows_).subspan(static_cast<size_t>(first_draw), count)),
       .params = params_,
       .ids = ids,
       .log_probs = log_probs,
       .kept_log_probs = {},
       .num_known = head_.num_known()});
}

// Waits for the step under way, if there is one, and hands its ids out.
void Run::fetch() {
  Step& step = under_way_;
  if (!std::exchange(step.is_queued, false)) return;
  ++stats_.num_steps;
  stats_.num_prompt_tokens += std::exchange(step.num_prompt_tokens, 0);
  const auto total = std::ssize(step.draws);
  for (int64_t begin = 0; begin < total; begin += max_draws_) {
    const int64_t count = std::min(max_draws_, total - begin);
    const int32_t* results = step.results.data() + 2 * begin;
    if (begin + count == total) {
      backend_.end_download(step.ticket, step.results.data() + 2 * begin);
    }
    for (int64_t i = 0; i < count; ++i) {
      draw(*step.draws[static_cast<size_t>(begin + i)], results[i],
           std::bit_cast<float>(results[count + i]));
    }
  }
  step.draws.clear();
  std::erase_if(running_, [](const Sequence* s) { return s->finished; });
  std::erase_if(waiting_, [](const Sequence* s) { return s->finished; });
}

// Takes one drawn id.
void Run::draw(Sequence& sequence, int32_t id, float log_prob) {
  if (sequence.finished) return;  // computed for nothing
  Completion& completion = *sequence.completion;
  const size_t at = sequence.request->ids.size() + completion.ids.size();
  sequence.ids[at] = id;
  if (at + 1 == sequence.ids.size()) sequence.sampled_row = -1;
  completion.ids.push_back(id);
  completion.log_probs.push_back(log_prob);
  ++num_tokens_;
  ++stats_.num_sampled_tokens;
  if (!finished(sequence, id)) return;
  sequence.finished = true;
  pages_.release_all(sequence.pages);
  ++num_finished_;
  if (on_finished_) on_finished_(completion);
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
  completion.finish_reason = FinishReason::kLength;
  return is_full(sequence) && sequence.num_drawn() == std::ssize(completion.ids);
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
  sampled_ = backend.allocator().allocate(num_bytes(decoder, head), "sampling");
}

// An id and a log-probability for each draw of a step, or of a piece of it.
int64_t Engine::num_bytes(const model::Decoder& decoder, const model::OutputHead& head) {
  return 2 * tensor::dtype_bytes(DType::kI32) *
         std::max(decoder.limits().max_sequences, head.chunk_rows());
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
          sampled_.view(DType::kI32, {num_bytes(decoder_, head_) / 4}), sampling, on_finished);
  size_t first = 0;
  for (const PromptRequest& request : requests) {
    if (request.num_samples == 0) continue;
    run.add(request, std::span(completions).subspan(first, request.num_samples));
    first += static_cast<size_t>(request.num_samples);
  }
  while (!run.done()) {
    throw_if_interrupted();
    run.step();
    if (progress) progress(run.num_finished(), run.num_tokens());
  }
  return completions;
}

}  // namespace octet::rollout
