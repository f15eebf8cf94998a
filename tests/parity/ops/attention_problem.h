// Sequences over a paged cache, run through kv_append and attention in any cut and order, with the
// float64 reference of the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parity/ops/op_test.h"

namespace octet::parity {

struct AttentionProblem {
  int64_t heads = 4, kv_heads = 2, width = 32, page_size = 16, window = 0;
  DType dtype = DType::kF32;  // of q, k, v, out
  DType cache = DType::kF32;
  float scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(width))); }
};

struct AttentionSequence {
  int64_t length = 0;
  Array q, k, v;  // [length, heads, width]
};

inline AttentionSequence make_sequence(const AttentionProblem& p, int64_t length, uint32_t seed) {
  AttentionSequence s;
  s.length = length;
  s.q = random_array(p.dtype, Shape{length, p.heads, p.width}, seed);
  s.k = random_array(p.dtype, Shape{length, p.kv_heads, p.width}, seed + 1);
  s.v = random_array(p.dtype, Shape{length, p.kv_heads, p.width}, seed + 2);
  return s;
}

// Rows as doubles: BF16 and F32 fit exactly, so equal values are equal bytes.
struct AttentionRows {
  std::vector<double> out, lse;
  bool operator==(const AttentionRows&) const = default;
};

// `tokens` new tokens of sequence `sequence`.
struct AttentionPart {
  size_t sequence;
  int64_t tokens;
};

class PagedCache {
 public:
  // Pages enough for all sequences and a few more, handed out in an order drawn from `seed` (0: in
  // their own order).
  PagedCache(const AttentionProblem& p, const std::vector<AttentionSequence>& sequences,
             uint32_t seed)
      : problem_(p) {
    int64_t num_pages = 3;
    for (const AttentionSequence& s : sequences) {
      max_pages_ = std::max(max_pages_, pages(s.length));
      num_pages += pages(s.length);
    }
    std::vector<int32_t> order(static_cast<size_t>(num_pages));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    if (seed != 0) {
      RandomSequence random({.seed = seed}, RngUse::kShuffle);
      for (size_t i = order.size() - 1; i > 0; --i) {
        std::swap(order[i], order[random.next_below(static_cast<uint32_t>(i + 1))]);
      }
    }
    size_t next = 0;
    for (const AttentionSequence& s : sequences) {
      std::vector<int32_t> table(static_cast<size_t>(max_pages_), -1);
      for (int64_t i = 0; i < pages(s.length); ++i) table[static_cast<size_t>(i)] = order[next++];
      tables_.push_back(table);
    }
    const Shape shape{num_pages, p.kv_heads, p.page_size, p.width};
    k_ = Array(p.cache, shape);
    v_ = Array(p.cache, shape);
    // What nobody wrote must not be read: not-a-number in every format.
    std::memset(k_.view().data, 0xFF, k_.bytes().size());
    std::memset(v_.view().data, 0xFF, v_.bytes().size());
    if (p.cache == DType::kE4M3) {
      k_scale_ = Array(DType::kF32, Shape{num_pages, p.kv_heads, p.page_size});
      v_scale_ = Array(DType::kF32, Shape{num_pages, p.kv_heads, p.page_size});
    }
  }

  ops::KvCacheView view() const { return {k_, v_, k_scale_, v_scale_}; }
  int64_t max_pages() const { return max_pages_; }
  const std::vector<int32_t>& table(size_t sequence) const { return tables_[sequence]; }
  int32_t slot(size_t sequence, int64_t position) const {
    const int32_t page = tables_[sequence][static_cast<size_t>(position / problem_.page_size)];
    return static_cast<int32_t>(page * problem_.page_size + position % problem_.page_size);
  }
  // The decoded value the cache holds.
  double value(bool is_key, size_t sequence, int64_t position, int64_t head, int64_t i) const {
    const int64_t page = tables_[sequence][static_cast<size_t>(position / problem_.page_size)];
    const int64_t first = (page * problem_.kv_heads + head) * problem_.page_size;
    const int64_t token = position % problem_.page_size, row = first + token;
    if (problem_.cache != DType::kE4M3) return (is_key ? k_ : v_).get(row * problem_.width + i);
    const double code =
        is_key ? k_.get(row * problem_.width + i)
               : v_.get(first * problem_.width + ops::value_index(token, i, problem_.width));
    const float scale = (is_key ? k_scale_ : v_scale_).view().as<float>()[row];
    return static_cast<double>(static_cast<float>(code) * scale);
  }

 private:
  int64_t pages(int64_t length) const {
    return (length + problem_.page_size - 1) / problem_.page_size;
  }
  AttentionProblem problem_;
  int64_t max_pages_ = 1;
  std::vector<std::vector<int32_t>> tables_;
  Array k_, v_, k_scale_, v_scale_;
};

// One call of kv_append and attention for `parts`; `done` counts each sequence's tokens so far.
// q, k and v are slices of one fused array, as the model has them.
inline void attend(ops::Backend& backend, const AttentionProblem& p,
                   const std::vector<AttentionSequence>& sequences, const PagedCache& cache,
                   const std::vector<AttentionPart>& parts, std::vector<int64_t>& done,
                   std::vector<AttentionRows>& rows) {
  int64_t num_tokens = 0;
  for (const AttentionPart& part : parts) num_tokens += part.tokens;
  const int64_t fused_width = (p.heads + 2 * p.kv_heads) * p.width;
  Array fused(p.dtype, Shape{num_tokens, fused_width});
  std::vector<int32_t> slots, offsets{0}, lengths, tables;
  int64_t t = 0;
  for (const AttentionPart& part : parts) {
    const AttentionSequence& s = sequences[part.sequence];
    for (int64_t i = 0; i < part.tokens; ++i, ++t) {
      const int64_t position = done[part.sequence] + i;
      int64_t column = 0;
      for (const auto& [array, heads] :
           {std::pair(&s.q, p.heads), {&s.k, p.kv_heads}, {&s.v, p.kv_heads}}) {
        for (int64_t c = 0; c < heads * p.width; ++c) {
          fused.set(t * fused_width + column++, array->get(position * heads * p.width + c));
        }
      }
      slots.push_back(cache.slot(part.sequence, position));
    }
    done[part.sequence] += part.tokens;
    offsets.push_back(static_cast<int32_t>(t));
    lengths.push_back(static_cast<int32_t>(done[part.sequence]));
    const auto& table = cache.table(part.sequence);
    tables.insert(tables.end(), table.begin(), table.end());
  }
  const auto slice = [&](int64_t begin, int64_t heads) {
    return fused.view()
        .slice_columns(begin * p.width, heads * p.width)
        .reshaped(Shape{num_tokens, heads, p.width});
  };
  const Array slots_array(slots), offsets_array(offsets), lengths_array(lengths);
  Array table_array(DType::kI32, Shape{static_cast<int64_t>(parts.size()), cache.max_pages()});
  for (size_t i = 0; i < tables.size(); ++i) table_array.set(static_cast<int64_t>(i), tables[i]);
  backend.kv_append({.k = slice(p.heads, p.kv_heads),
                     .v = slice(p.heads + p.kv_heads, p.kv_heads),
                     .slots = slots_array,
                     .cache = cache.view()});
  ops::AttentionBatch batch{offsets_array, lengths_array, table_array};
  batch.min_query_tokens = std::ranges::min(parts, {}, &AttentionPart::tokens).tokens;
  const Array out = random_array(p.dtype, Shape{num_tokens, p.heads, p.width}, 9, 1, 3 * p.width);
  const Array lse(DType::kF32, Shape{num_tokens, p.heads});
  backend.attention({.q = slice(0, p.heads),
                     .cache = cache.view(),
                     .batch = batch,
                     .out = out,
                     .lse = lse,
                     .scale = p.scale(),
                     .window = p.window});
  t = 0;
  for (const AttentionPart& part : parts) {
    AttentionRows& to = rows[part.sequence];
    const int64_t row = p.heads * p.width;
    for (int64_t i = 0; i < part.tokens * row; ++i) to.out.push_back(out.get(t * row + i));
    for (int64_t i = 0; i < part.tokens * p.heads; ++i) {
      to.lse.push_back(lse.get(t * p.heads + i));
    }
    t += part.tokens;
  }
}

// All sequences in one prefill.
inline std::vector<AttentionPart> whole(const std::vector<AttentionSequence>& sequences) {
  std::vector<AttentionPart> parts;
  for (size_t s = 0; s < sequences.size(); ++s) parts.push_back({s, sequences[s].length});
  return parts;
}

struct AttentionRun {
  std::vector<AttentionRows> rows;
  PagedCache cache;
};

// The steps one after the other, pages in the order of `seed`.
inline AttentionRun run_attention(ops::Backend& backend, const AttentionProblem& p,
                                  const std::vector<AttentionSequence>& sequences,
                                  const std::vector<std::vector<AttentionPart>>& steps,
                                  uint32_t seed = 0) {
  AttentionRun run{std::vector<AttentionRows>(sequences.size()), PagedCache(p, sequences, seed)};
  std::vector<int64_t> done(sequences.size(), 0);
  for (const auto& parts : steps) {
    attend(backend, p, sequences, run.cache, parts, done, run.rows);
  }
  return run;
}

// Sequences of no context behind two that decode: zeros, and the two have the same bytes.
inline void check_fillers(ops::Backend& backend, const AttentionProblem& p) {
  std::vector<AttentionSequence> sequences;
  sequences.push_back(make_sequence(p, 70, 1));
  sequences.push_back(make_sequence(p, 3, 2));
  const PagedCache cache = run_attention(backend, p, sequences, {whole(sequences)}).cache;
  const Array q = random_array(p.dtype, Shape{4, p.heads, p.width}, 3);
  std::vector<double> expected;
  for (const int64_t count : {2, 4}) {
    const std::vector<int32_t> all_offsets{0, 1, 2, 3, 4}, all_lengths{70, 3, 0, 0};
    const Array offsets({all_offsets.begin(), all_offsets.begin() + count + 1});
    const Array lengths({all_lengths.begin(), all_lengths.begin() + count});
    const Array table(DType::kI32, Shape{count, cache.max_pages()});
    for (size_t s = 0; s < 2; ++s) {
      std::copy_n(cache.table(s).begin(), cache.max_pages(),
                  table.view().row<int32_t>(static_cast<int64_t>(s)));
    }
    const Array out = random_array(p.dtype, Shape{count, p.heads, p.width}, 4);
    backend.attention({.q = q.view().slice_rows(0, count),
                       .cache = cache.view(),
                       .batch = {offsets, lengths, table, 1, 70},
                       .out = out,
                       .lse = {},
                       .scale = p.scale(),
                       .window = p.window});
    if (count == 2) expected = out.values();
    if (count == 4) expected.resize(2 * expected.size(), 0.0);
    EXPECT_TRUE(out.values() == expected) << count;
  }
}

// A NaN among the keys of head 0 and one among the values of head 1: rows that do not see it have
// the bytes that they have without, rows that see it are NaN (of a value that is no code, its
// element alone), in one go and in any chunks.
inline void check_nan_reaches_whom_it_may(ops::Backend& backend, const AttentionProblem& p) {
  constexpr int64_t kLength = 150, kPositions[] = {37, 70};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<AttentionSequence> clean, marred;
  clean.push_back(make_sequence(p, kLength, 1));
  marred.push_back(make_sequence(p, kLength, 1));
  marred[0].k.set((kPositions[0] * p.kv_heads + 0) * p.width + 3, nan);
  marred[0].v.set((kPositions[1] * p.kv_heads + 1) * p.width + 5, nan);
  const AttentionRows expected = run_attention(backend, p, clean, {whole(clean)}).rows[0];
  for (const int64_t chunk : {int64_t{1}, int64_t{7}, int64_t{64}, kLength}) {
    std::vector<std::vector<AttentionPart>> steps;
    for (int64_t done = 0; done < kLength; done += chunk) {
      steps.push_back({{0, std::min(chunk, kLength - done)}});
    }
    const AttentionRows rows = run_attention(backend, p, marred, steps, 5).rows[0];
    for (int64_t row = 0; row < kLength * p.heads; ++row) {
      const int64_t kv_head = row % p.heads / (p.heads / p.kv_heads);
      const int64_t after = row / p.heads - (kv_head < 2 ? kPositions[kv_head] : kLength);
      const bool sees = after >= 0 && (p.window == 0 || after < p.window);
      bool same = true, all_nan = true, any_nan = false;
      for (auto i = static_cast<size_t>(row * p.width);
           i < static_cast<size_t>((row + 1) * p.width); ++i) {
        same &= rows.out[i] == expected.out[i];
        all_nan &= std::isnan(rows.out[i]);
        any_nan |= std::isnan(rows.out[i]);
      }
      const bool alone = kv_head == 1 && p.cache != DType::kE4M3;
      ASSERT_TRUE(!sees   ? same
                  : alone ? any_nan
                          : all_nan)
          << "chunk " << chunk << " window " << p.window << " width " << p.width << " token "
          << row / p.heads << " head " << row % p.heads;
      if (!sees || kv_head == 1) {
        ASSERT_EQ(rows.lse[static_cast<size_t>(row)], expected.lse[static_cast<size_t>(row)]);
      }
    }
  }
}

// An infinite element among the values of head 1, which every row sees: infinite in all of its
// query heads' rows, whether they decode or come in one go.
inline void check_infinity_stays(ops::Backend& backend, const AttentionProblem& p) {
  constexpr int64_t kLength = 70, kElement = 5;
  std::vector<AttentionSequence> sequences;
  sequences.push_back(make_sequence(p, kLength, 1));
  sequences[0].v.set(p.width + kElement, std::numeric_limits<float>::infinity());
  const AttentionRows expected = run_attention(backend, p, sequences, {whole(sequences)}).rows[0];
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t row = 0; row < kLength * p.heads; ++row) {
    const bool is_infinite = row % p.heads / group == 1;
    ASSERT_EQ(std::isinf(expected.out[static_cast<size_t>(row * p.width + kElement)]), is_infinite)
        << "token " << row / p.heads << " head " << row % p.heads;
  }
  const std::vector<std::vector<AttentionPart>> steps(kLength, {{0, 1}});
  EXPECT_TRUE(run_attention(backend, p, sequences, steps).rows[0] == expected);
}

// Values that are no finite numbers, here and there: rows that see none of them have the bytes that
// they have without, as have all other elements, and the others those of decoding, in any chunks.
inline void check_unseen_values_count_for_nothing(ops::Backend& backend,
                                                  const AttentionProblem& p) {
  constexpr int64_t kLength = 330, kElement = 5;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::pair<int64_t, float> marks[] = {{37, kInfinity}, {90, -kInfinity}, {170, kNan},
                                             {250, 3e38f},    {251, 3e38f},     {261, kInfinity},
                                             {300, kNan}};
  std::vector<AttentionSequence> clean, marred;
  clean.push_back(make_sequence(p, kLength, 1));
  marred.push_back(make_sequence(p, kLength, 1));
  for (const auto& [position, value] : marks) {
    marred[0].v.set((position * p.kv_heads + 1) * p.width + kElement, value);
  }
  const AttentionRows expected = run_attention(backend, p, clean, {whole(clean)}).rows[0];
  std::vector<double> decoded;
  for (const int64_t chunk : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{200}, kLength}) {
    std::vector<std::vector<AttentionPart>> steps;
    for (int64_t done = 0; done < kLength; done += chunk) {
      steps.push_back({{0, std::min(chunk, kLength - done)}});
    }
    const AttentionRows rows = run_attention(backend, p, marred, steps, 5).rows[0];
    EXPECT_TRUE(rows.lse == expected.lse) << "chunk " << chunk;
    if (chunk == 1) decoded = rows.out;
    for (size_t i = 0; i < rows.out.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / p.width;
      const int64_t token = row / p.heads, head = row % p.heads / (p.heads / p.kv_heads);
      const bool sees = std::ranges::any_of(marks, [&](const auto& mark) {
        return mark.first <= token && (p.window == 0 || token - mark.first < p.window);
      });
      const bool marked = sees && head == 1 && static_cast<int64_t>(i) % p.width == kElement;
      const double other = marked ? decoded[i] : expected.out[i];
      ASSERT_TRUE(rows.out[i] == other || (std::isnan(rows.out[i]) && std::isnan(other)))
          << "chunk " << chunk << " window " << p.window << " width " << p.width << " token "
          << token << " head " << head << " element " << static_cast<int64_t>(i) % p.width << ": "
          << rows.out[i] << ", not " << other;
    }
  }
}

// Float64: outputs, and where `dout` is given ([length · heads · width]) the gradients; δ =
// dout·out takes the output that the backward is given.
struct AttentionReference {
  std::vector<double> out, lse, dq, dk, dv;
};
inline AttentionReference reference_attention(const AttentionProblem& p, const PagedCache& cache,
                                              size_t sequence, int64_t length,
                                              const std::vector<double>& q,
                                              const std::vector<double>& dout = {},
                                              const std::vector<double>& rounded_out = {}) {
  const int64_t group = p.heads / p.kv_heads, width = p.width;
  AttentionReference r;
  r.out.assign(static_cast<size_t>(length * p.heads * width), 0);
  r.lse.assign(static_cast<size_t>(length * p.heads), 0);
  r.dq = r.out;
  r.dk.assign(static_cast<size_t>(length * p.kv_heads * width), 0);
  r.dv = r.dk;
  std::vector<double> k(r.dk.size()), v(r.dk.size());
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t g = 0; g < p.kv_heads; ++g) {
      for (int64_t i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>((t * p.kv_heads + g) * width + i);
        k[at] = cache.value(true, sequence, t, g, i);
        v[at] = cache.value(false, sequence, t, g, i);
      }
    }
  }
  const double scale = p.scale();
  for (int64_t t = 0; t < length; ++t) {
    const int64_t first = p.window > 0 ? std::max<int64_t>(0, t + 1 - p.window) : 0;
    for (int64_t h = 0; h < p.heads; ++h) {
      const auto row = static_cast<size_t>((t * p.heads + h) * width);
      const auto key = [&](int64_t position) {
        return static_cast<size_t>((position * p.kv_heads + h / group) * width);
      };
      std::vector<double> weights;
      double maximum = -INFINITY, sum = 0;
      for (int64_t j = first; j <= t; ++j) {
        double dot = 0;
        for (size_t i = 0; i < static_cast<size_t>(width); ++i) dot += q[row + i] * k[key(j) + i];
        weights.push_back(dot * scale);
        maximum = std::max(maximum, weights.back());
      }
      for (double& w : weights) sum += w = std::exp(w - maximum);
      r.lse[static_cast<size_t>(t * p.heads + h)] = maximum + std::log(sum);
      for (int64_t j = first; j <= t; ++j) {
        const double weight = weights[static_cast<size_t>(j - first)] /= sum;
        for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
          r.out[row + i] += weight * v[key(j) + i];
        }
      }
      if (dout.empty()) continue;
      double delta = 0;
      for (size_t i = 0; i < static_cast<size_t>(width); ++i)
        delta += dout[row + i] * rounded_out[row + i];
      for (int64_t j = first; j <= t; ++j) {
        const double weight = weights[static_cast<size_t>(j - first)];
        double dweight = 0;
        for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
          dweight += dout[row + i] * v[key(j) + i];
        }
        const double dscore = weight * (dweight - delta) * scale;
        for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
          r.dq[row + i] += dscore * k[key(j) + i];
          r.dk[key(j) + i] += dscore * q[row + i];
          r.dv[key(j) + i] += weight * dout[row + i];
        }
      }
    }
  }
  return r;
}

}  // namespace octet::parity
