// What keys mean together: defaults that depend on other keys, and conflicts.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "loop/config_keys.h"

namespace octet::loop {
namespace {

class Checker {
 public:
  Checker(TrainConfig& config, const GivenKeys& given, std::string_view where)
      : c_(config), given_(given), where_(where) {}

  void run() {
    resolve();
    check_model();
    check_precision();
    check_data();
    check_rollout();
    check_algorithm();
    check_steps();
  }

 private:
  bool is_given(std::string_view name) const { return given_.contains(name); }

  // Where the first of `names` that was given stands, else the file.
  std::string place(std::initializer_list<std::string_view> names) const {
    for (const std::string_view name : names) {
      if (const auto found = given_.find(name); found != given_.end()) return found->second;
    }
    return std::string(where_);
  }

  void resolve() {
    if (!is_given("run.dir")) {
      c_.run.dir = "runs/" + std::filesystem::path(where_).stem().string();
    }
    if (c_.run.dir.empty()) {
      fail_usage(place({"run.dir"}), "run.dir must name a folder, but is empty");
    }
    while (c_.run.dir.size() > 1 && c_.run.dir.ends_with('/')) c_.run.dir.pop_back();
    if (!is_given("algorithm.loss_type") && !c_.is_rl()) c_.algorithm.loss_type = "sft";
    if (!is_given("algorithm.scale_rewards") && c_.algorithm.loss_type == "dr_grpo") {
      c_.algorithm.scale_rewards = "none";
    }
    if (!is_given("model.load_in_fp8") && !c_.is_fp8()) c_.model.load_in_fp8 = "false";
    if (!is_given("clip.mode")) c_.clip.mode = c_.is_fp8() && c_.is_rl() ? "calibrated" : "fixed";
    if (!is_given("clip.epsilon_high")) {
      const double other = c_.clip.mode == "calibrated" ? 0.24 : c_.clip.epsilon;
      c_.clip.epsilon_high = c_.algorithm.loss_type == "dapo" ? 0.28 : other;
    }
    if (!is_given("optim.learning_rate")) c_.optim.learning_rate = c_.is_rl() ? 1e-6 : 2e-5;
    std::erase(c_.run.report_to, "none");
  }

  void check_model() {
    const ModelSection& model = c_.model;
    if (model.path.empty() == !model.init) {
      fail_usage(place({"model.path"}),
                 "exactly one of model.path (a checkpoint) and model.init (random weights) must be "
                 "given, but {}",
                 model.init ? "both are" : "neither is");
    }
    if (!model.init) return;
    const ModelInit& init = *model.init;
    if (init.num_attention_heads % init.num_key_value_heads != 0) {
      fail_usage(place({"model.init.num_key_value_heads", "model.init.num_attention_heads"}),
                 "model.init.num_attention_heads must be a multiple of num_key_value_heads, but "
                 "they are {} and {}",
                 init.num_attention_heads, init.num_key_value_heads);
    }
    if (init.head_dim % 2 != 0) {
      fail_usage(place({"model.init.head_dim"}), "model.init.head_dim must be even, but is {}",
                 init.head_dim);
    }
    if (init.max_position_embeddings < model.max_seq_length) {
      fail_usage(place({"model.init.max_position_embeddings", "model.max_seq_length"}),
                 "model.init.max_position_embeddings must be at least model.max_seq_length, but "
                 "they are {} and {}",
                 init.max_position_embeddings, model.max_seq_length);
    }
    if (c_.data.task.empty()) {
      fail_usage(place({"data.train"}),
                 "model.init needs data.task, which brings the vocabulary; for data.train give "
                 "model.path");
    }
  }

  void check_precision() {
    const std::string& flow = c_.precision.flow;
    const std::string& fp8 = c_.model.load_in_fp8;
    const std::string at_fp8 = place({"model.load_in_fp8", "precision.flow"});
    if (!c_.is_fp8() && fp8 != "false") {
      fail_usage(at_fp8,
                 "model.load_in_fp8 = \"{}\" needs an FP8 flow, but precision.flow is \"bf16\"; "
                 "set the flow or leave the granularity out",
                 fp8);
    }
    if (c_.is_fp8() && fp8 == "false") {
      fail_usage(at_fp8,
                 "precision.flow = \"{}\" needs a granularity, but model.load_in_fp8 is false; "
                 "give \"tensor\", \"channel\" or \"block\"",
                 flow);
    }
    if (c_.model.dtype == "float32" && (c_.is_fp8() || c_.model.kv_cache_dtype == "fp8")) {
      fail_usage(place({"model.dtype"}),
                 "model.dtype = \"float32\" rounds nothing, so it needs precision.flow = \"bf16\" "
                 "and model.kv_cache_dtype = \"bf16\", but they are \"{}\" and \"{}\"",
                 flow, c_.model.kv_cache_dtype);
    }
    if (flow == "fp8_lora" && !c_.lora) {
      fail_usage(place({"precision.flow"}),
                 "precision.flow = \"fp8_lora\" trains an adapter and needs a [lora] section; add "
                 "it, or train all weights with \"fp8_full\"");
    }
    if (flow == "fp8_full" && c_.lora) {
      fail_usage(place({"precision.flow"}),
                 "[lora] goes with the flows \"bf16\" and \"fp8_lora\", but precision.flow is "
                 "\"fp8_full\"; leave [lora] out, or take \"fp8_lora\"");
    }
    if (!c_.lora) return;
    if (c_.lora->lora_dropout != 0) {
      fail_usage(place({"lora.lora_dropout"}), "lora.lora_dropout must be 0{}, but is {}",
                 c_.is_rl() ? " where there is a rollout, so that sampling and training are one "
                              "policy"
                            : " in this version",
                 c_.lora->lora_dropout);
    }
    if (c_.model.init) {
      fail_usage(place({"lora.r", "lora.lora_alpha", "precision.flow"}),
                 "[lora] adapts a checkpoint, so it needs model.path; random weights from "
                 "model.init would be lost beside their adapter");
    }
    if (c_.lora->target_modules.empty()) {
      fail_usage(place({"lora.target_modules"}),
                 "lora.target_modules must name a linear such as \"q_proj\", but is empty");
    }
  }

  void check_data() {
    const DataSection& data = c_.data;
    if (data.train.empty() == data.task.empty()) {
      fail_usage(place({"data.train", "data.task"}),
                 "exactly one of data.train (a file) and data.task (a generator) must be given, "
                 "but {}",
                 data.task.empty() ? "neither is" : "both are");
    }
    if (!data.task.empty() && !data.eval.empty()) {
      fail_usage(place({"data.eval"}),
                 "data.task holds out its own problems (data.task_eval_size); leave data.eval out");
    }
    const RewardSection& reward = c_.reward;
    const size_t num_rewards = reward.functions.size() + (reward.command.empty() ? 0 : 1);
    const bool has_eval =
        data.task.empty() ? !data.eval.empty() : data.task_eval_size > 0 && num_rewards > 0;
    if (c_.train.eval_steps > 0 && !has_eval) {
      fail_usage(place({"train.eval_steps"}),
                 "train.eval_steps = {} needs something to evaluate on: give data.eval, or "
                 "data.task_eval_size and a reward with data.task",
                 c_.train.eval_steps);
    }
    const int64_t cells = static_cast<int64_t>(std::pow(10, 2 * data.task_digits));
    if (!data.task.empty() && data.task_eval_size > cells / 2) {
      fail_usage(place({"data.task_eval_size"}),
                 "data.task_eval_size must be at most half of the {} problems of {} digits, but "
                 "is {}",
                 cells, data.task_digits, data.task_eval_size);
    }
    if (c_.is_rl() && num_rewards == 0) {
      fail_usage(place({"algorithm.name"}),
                 "algorithm.name = \"{}\" needs a reward: give reward.functions or reward.command",
                 c_.algorithm.name);
    }
    if (!reward.reward_weights.empty() && reward.reward_weights.size() != num_rewards) {
      fail_usage(place({"reward.reward_weights"}),
                 "reward.reward_weights must have one weight for each of the {} rewards, but has "
                 "{}",
                 num_rewards, reward.reward_weights.size());
    }
    if (std::ranges::count(reward.functions, "regex") != 0 && reward.pattern.empty()) {
      fail_usage(place({"reward.functions"}), "the reward \"regex\" needs reward.pattern");
    }
    if (std::ranges::count(reward.functions, "length") != 0 && reward.soft_punish_cache == 0) {
      fail_usage(place({"reward.functions"}),
                 "the reward \"length\" needs reward.soft_punish_cache, in tokens");
    }
  }

  void check_rollout() {
    const int64_t length = c_.model.max_seq_length;
    const int64_t completion = c_.rollout.max_completion_length;
    if (c_.is_rl() && completion + std::max<int64_t>(1, c_.data.max_prompt_length) > length) {
      fail_usage(place({"rollout.max_completion_length", "data.max_prompt_length",
                        "model.max_seq_length"}),
                 "prompt and completion must fit into model.max_seq_length = {}, but "
                 "data.max_prompt_length is {} and rollout.max_completion_length {}",
                 length, c_.data.max_prompt_length, completion);
    }
    if (c_.reward.soft_punish_cache > completion) {
      fail_usage(place({"reward.soft_punish_cache"}),
                 "reward.soft_punish_cache must be at most rollout.max_completion_length = {}, but "
                 "is {}",
                 completion, c_.reward.soft_punish_cache);
    }
    if (c_.is_rl() && c_.rollout.num_generations < 2) {
      fail_usage(place({"rollout.num_generations"}),
                 "rollout.num_generations must be at least 2: a sample's advantage is taken "
                 "against its group; it is {}",
                 c_.rollout.num_generations);
    }
  }

  void check_algorithm() {
    if (c_.is_rl() == (c_.algorithm.loss_type == "sft")) {
      fail_usage(place({"algorithm.loss_type", "algorithm.name"}),
                 "algorithm.loss_type = \"{}\" does not go with algorithm.name = \"{}\"; leave "
                 "loss_type out for its default",
                 c_.algorithm.loss_type, c_.algorithm.name);
    }
    if (c_.clip.mode == "calibrated" && !(c_.is_fp8() && c_.is_rl())) {
      fail_usage(place({"clip.mode"}),
                 "clip.mode = \"calibrated\" compares an FP8 policy's ratios with BF16's, so it "
                 "needs RL in an FP8 flow, but algorithm.name is \"{}\" and precision.flow \"{}\"; "
                 "take \"fixed\"",
                 c_.algorithm.name, c_.precision.flow);
    }
    const std::vector<double>& start = c_.clip.calibration_init;
    if (start.size() != 2 || !(start[0] >= 0.5 && start[0] <= 0.9) ||
        !(start[1] >= 1.2 && start[1] <= 2.0)) {
      fail_usage(place({"clip.calibration_init"}),
                 "clip.calibration_init must be [lower, upper] with lower in [0.5, 0.9] and upper "
                 "in [1.2, 2]");
    }
  }

  void check_steps() {
    const TrainSection& train = c_.train;
    const int64_t batch =
        train.prompts_per_step * (c_.is_rl() ? c_.rollout.num_generations : int64_t{1});
    if (batch % train.mini_batches != 0) {
      fail_usage(place({"train.mini_batches", "train.prompts_per_step"}),
                 "a step's {} {} must divide evenly into train.mini_batches = {}", batch,
                 c_.is_rl() ? "samples (prompts_per_step × num_generations)"
                            : "sequences (prompts_per_step)",
                 train.mini_batches);
    }
    if (train.max_steps == 0 && !c_.data.task.empty()) {
      fail_usage(place({"train.max_steps", "data.task"}),
                 "data.task has no end, so train.max_steps must be at least 1");
    }
  }

  TrainConfig& c_;
  const GivenKeys& given_;
  std::string_view where_;
};

}  // namespace

void resolve_config(TrainConfig& config, const GivenKeys& given, std::string_view where) {
  Checker(config, given, where).run();
}

}  // namespace octet::loop
