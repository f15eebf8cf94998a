// One copy of the weights, rewritten in place: what the forward reads after an update is what a
// checkpoint of it would give.
#include "model/weight_store.h"

#include <cmath>

#include <gtest/gtest.h>

#include "io/checkpoint.h"
#include "support/tiny_policy.h"
#include "train/adamw.h"
#include "unit/io/test_files.h"

namespace octet::model {
namespace {

using test::TinyOptions;
using test::TinyPolicy;

void set_gradients(TinyPolicy& p, float size) {
  uint32_t index = 0;
  for (Parameter& parameter : p.model.weights().parameters()) {
    if (!parameter.trained) continue;
    std::vector<float> values(static_cast<size_t>(parameter.shape.num_elements()));
    RandomSequence random({.seed = 21, .prompt = index++}, RngUse::kTask);
    for (float& v : values) v = size * (random.next_unit() - 0.5f);
    p.backend->upload(values.data(), parameter.gradient);
  }
}

// Everything that the forward reads, but not the masters.
std::vector<std::vector<uint8_t>> forward_bytes(TinyPolicy& p) {
  std::vector<std::vector<uint8_t>> all;
  for (const Parameter& parameter : p.model.weights().parameters()) {
    for (const tensor::TensorView& view : {parameter.dense, parameter.quantized.codes,
                                           parameter.quantized.scales, parameter.row_scales}) {
      all.push_back(test::bytes_of(*p.backend, view));
    }
  }
  return all;
}

TEST(WeightStore, RequantisedInPlaceEqualsACheckpointLoadedAnew) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    for (const tensor::ScaleFormat format :
         {tensor::ScaleFormat::kF32, tensor::ScaleFormat::kPow2}) {
      TinyOptions o;
      o.tied = o.qk_norm = o.bias = true;
      o.inner = 257;
      o.precision.flow = Flow::kFp8Full;
      o.precision.scales = scales;
      o.precision.scale_format = format;
      TinyPolicy trained(o);
      const auto before = forward_bytes(trained);
      train::AdamW optimizer(trained.backend->allocator(), trained.model.weights(), {});
      for (int step = 0; step < 3; ++step) {
        set_gradients(trained, 1.0f);
        ASSERT_TRUE(optimizer.step(*trained.backend, 0.01).applied);
      }
      EXPECT_EQ(trained.model.weights().policy_version(), 3);
      EXPECT_NE(forward_bytes(trained), before);

      const io::TempFolder folder;
      save_weights(*trained.backend, trained.model, folder.path());
      for (const Training training : {Training::kFull, Training::kNone}) {
        TinyOptions fresh = o;
        fresh.seed = 99;
        fresh.training = training;
        TinyPolicy loaded(fresh);
        io::Checkpoint checkpoint(folder.path());
        load_weights(*loaded.backend, loaded.model, checkpoint);
        EXPECT_TRUE(forward_bytes(loaded) == forward_bytes(trained)) << weight_scales_name(scales);
      }
    }
  }
}

// Codes and scales of a group are those of one matrix, whatever its parts are called.
TEST(WeightStore, TheWeightsOfAGroupLieSideBySide) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    for (const Flow flow : {Flow::kBf16, Flow::kFp8Full}) {
      TinyOptions o;
      o.precision.flow = flow;
      o.precision.scales = scales;
      TinyPolicy p(o);
      for (const DecoderLayer& layer : p.model.layers()) {
        for (const auto* group : {&layer.qkv, &layer.gate_up}) {
          for (size_t i = 1; i < group->size(); ++i) {
            const ops::Weight last = (*group)[i - 1].weight->forward_weight();
            const ops::Weight next = (*group)[i].weight->forward_weight();
            const auto expect_beside = [](const tensor::TensorView& a,
                                          const tensor::TensorView& b) {
              EXPECT_EQ(a.as<char>() + a.num_bytes(), b.as<char>());
            };
            if (flow == Flow::kBf16) {
              expect_beside(last.dense, next.dense);
              continue;
            }
            expect_beside(last.quantized.codes, next.quantized.codes);
            expect_beside(last.quantized.scales, next.quantized.scales);
          }
        }
      }
    }
  }
}

// A tensor set in pieces of whole granules is the tensor set at once.
TEST(WeightStore, RowsSetInPiecesGiveTheSameBytes) {
  for (const WeightScales scales :
       {WeightScales::kTensor, WeightScales::kChannel, WeightScales::kBlock}) {
    for (const Training training : {Training::kFull, Training::kNone}) {
      TinyOptions o;
      o.inner = 300;
      o.training = training;
      o.precision.flow = Flow::kFp8Full;
      o.precision.scales = scales;
      TinyPolicy whole(o), pieces(o);
      for (Parameter& to : pieces.model.weights().parameters()) {
        std::vector<float> values(static_cast<size_t>(to.shape.num_elements()));
        RandomSequence random({.seed = 5}, RngUse::kTask);
        for (float& value : values) value = random.next_unit() - 0.5f;
        whole.set(whole.parameter(to.name), values);
        const tensor::Buffer buffer =
            pieces.backend->allocator().allocate(tensor::DType::kF32, to.shape, "test");
        const tensor::TensorView view = buffer.view(tensor::DType::kF32, to.shape);
        pieces.backend->upload(values.data(), view);
        const int64_t granule = WeightStore::row_granule(to);
        for (int64_t row = 0; row < to.shape[0]; row += granule) {
          const int64_t count = std::min(granule, to.shape[0] - row);
          pieces.model.weights().assign(*pieces.backend, to, view.slice_rows(row, count), row);
        }
      }
      EXPECT_TRUE(test::weight_bytes(pieces) == test::weight_bytes(whole))
          << weight_scales_name(scales);
    }
  }
}

TEST(WeightStore, OneScaleIsThatOfEveryRow) {
  TinyOptions o;
  o.precision.flow = Flow::kFp8Full;
  o.precision.scales = WeightScales::kTensor;
  TinyPolicy p(o);
  const auto check = [&] {
    for (const LinearLayer* layer : p.model.linear_layers()) {
      const Parameter& weight = *layer->weight;
      EXPECT_EQ(weight.weight().quantized.granularity, tensor::Granularity::kTensor);
      const tensor::QuantizedView read = weight.forward_weight().quantized;
      EXPECT_EQ(read.granularity, tensor::Granularity::kRow);
      const float scale = test::floats_of(*p.backend, weight.quantized.scales)[0];
      EXPECT_EQ(test::floats_of(*p.backend, read.scales),
                std::vector<float>(static_cast<size_t>(weight.shape[0]), scale));
    }
  };
  check();
  train::AdamW optimizer(p.backend->allocator(), p.model.weights(), {});
  set_gradients(p, 1.0f);
  ASSERT_TRUE(optimizer.step(*p.backend, 0.01).applied);
  check();
}

TEST(WeightStore, TiedHeadIsOneTensorAfterAStep) {
  TinyOptions o;
  o.tied = true;
  TinyPolicy p(o);
  EXPECT_EQ(&p.model.head(), &p.model.embedding());
  EXPECT_EQ(p.model.weights().find("lm_head.weight"), nullptr);
  train::AdamW optimizer(p.backend->allocator(), p.model.weights(), {});
  const std::vector<int32_t> ids = test::random_ids(9, 1);
  train::TrainSample sample;
  sample.ids = ids;
  sample.first_target = 3;
  train::train_micro_batch(*p.backend, p.policy(), {&sample, 1}, 1.0f,
                           [](auto, std::span<std::vector<float>> g) {
                             g[0].assign(g[0].size(), -1.0f);
                             return true;
                           });
  const auto before = test::floats_of(*p.backend, p.model.head().master);
  ASSERT_TRUE(optimizer.step(*p.backend, 0.01).applied);
  EXPECT_NE(test::floats_of(*p.backend, p.model.head().master), before);
  // Both ends read it: a model untied into two equal tensors gives the same bits.
  TinyOptions untied = o;
  untied.tied = false;
  TinyPolicy two(untied);
  for (Parameter& parameter : two.model.weights().parameters()) {
    const bool head = parameter.name == "lm_head.weight";
    two.set(parameter,
            test::floats_of(*p.backend,
                            (head ? p.model.embedding() : p.parameter(parameter.name)).master));
  }
  const ScoringRequest request{ids, 1};
  const auto score = [&](TinyPolicy& policy) {
    return score_sequences(*policy.backend, policy.decoder, policy.head, policy.pages,
                           {&request, 1}, 1.0f)[0];
  };
  test::expect_equal_bits(score(p).log_probs, score(two).log_probs, "tied and untied");
}

TEST(WeightStore, TheForwardReadsTheBf16RoundingOfTheMaster) {
  TinyPolicy p{TinyOptions()};
  Parameter& parameter = p.parameter("model.layers.1.mlp.up_proj.weight");
  std::vector<float> values(static_cast<size_t>(parameter.shape.num_elements()), 1.0f);
  values[0] = 1.0f + 0x1p-9f;      // below half a BF16 step
  values[1] = 1.0f + 3 * 0x1p-9f;  // above
  p.set(parameter, values);
  EXPECT_EQ(test::floats_of(*p.backend, parameter.master), values);
  std::vector<uint16_t> codes(values.size());
  p.backend->download(parameter.dense, codes.data());
  EXPECT_EQ(codes[0], 0x3F80);
  EXPECT_EQ(codes[1], 0x3F81);
}

TEST(WeightStore, FrozenFp8WeightsHaveNoSecondCopy) {
  TinyOptions o;
  o.training = Training::kLora;
  o.lora_rank = 4;
  o.precision.flow = Flow::kFp8Lora;
  TinyPolicy p(o);
  for (const LinearLayer* layer : p.model.linear_layers()) {
    EXPECT_TRUE(layer->weight->master.empty() && layer->weight->dense.empty() &&
                layer->weight->gradient.empty());
    EXPECT_FALSE(layer->weight->quantized.empty());
    EXPECT_TRUE(layer->lora.a->trained && layer->lora.b->trained);
    EXPECT_FALSE(layer->lora.a->dense.empty());
  }
  EXPECT_THROW(save_weights(*p.backend, p.model, "/nonexistent"), Error);
  TinyOptions full = o;
  full.training = Training::kFull;
  EXPECT_THROW(TinyPolicy{full}, UsageError);
}

}  // namespace
}  // namespace octet::model
