#include "loop/checkpoint.h"

#include <filesystem>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/strings.h"
#include "io/safetensors.h"

namespace octet::loop {
namespace {

namespace fs = std::filesystem;
using tensor::DType;
using tensor::TensorView;

constexpr const char* kMoments[] = {"", ".first_moment", ".second_moment"};

TensorView slot_view(const train::AdamW::Slot& slot, int which) {
  return which == 0 ? slot.parameter->master : which == 1 ? slot.first_moment : slot.second_moment;
}

}  // namespace

void save_state(ops::Backend& backend, model::Model& model, train::Trainer& trainer,
                const Json& extra, const std::string& folder) {
  std::vector<io::TensorSpec> specs;
  std::unordered_map<std::string, TensorView> views;
  for (const auto& slot : trainer.optimizer().slots()) {
    for (int which = 0; which < 3; ++which) {
      const std::string name = slot.parameter->name + kMoments[which];
      const TensorView view = slot_view(slot, which);
      const ops::SquaredNorm norm = backend.squared_norm(view);
      if (norm.non_finite > 0) {
        fail(name,
             "a checkpoint must be finite, but {} of its values are not; resume from "
             "an earlier checkpoint with a lower learning rate",
             norm.non_finite);
      }
      specs.push_back({name, DType::kF32, slot.parameter->shape});
      views.emplace(name, view);
    }
  }
  std::vector<float> values;
  io::write_safetensors((fs::path(folder) / "state.safetensors").string(), specs,
                        [&](const io::TensorSpec& spec) {
                          values.resize(static_cast<size_t>(spec.shape.num_elements()));
                          backend.download(views.at(spec.name), values.data());
                          return TensorView(values.data(), DType::kF32, spec.shape);
                        });
  Json state = Json::object();
  state["optimizer_steps"] = trainer.optimizer().num_steps();
  state["updates"] = trainer.num_updates();
  state["policy_version"] = model.weights().policy_version();
  if (trainer.calibrator() != nullptr) state["calibration"] = trainer.calibrator()->state();
  state["loop"] = extra;
  write_file_atomically((fs::path(folder) / "state.json").string(), state.dump(1) + "\n");
}

Json restore_state(ops::Backend& backend, model::Model& model, train::Trainer& trainer,
                   const std::string& folder) {
  const io::SafetensorsFile file((fs::path(folder) / "state.safetensors").string());
  size_t expected = 0;
  for (const auto& slot : trainer.optimizer().slots()) {
    for (int which = 0; which < 3; ++which, ++expected) {
      const std::string name = slot.parameter->name + kMoments[which];
      const TensorView view = file.view(name);
      if (view.shape != slot.parameter->shape || view.dtype != DType::kF32) {
        fail(folder, "{} must be F32 {}, but is {} {}; the checkpoint belongs to another model",
             name, slot.parameter->shape.to_string(), tensor::dtype_name(view.dtype),
             view.shape.to_string());
      }
      backend.upload(view.data, slot_view(slot, which));
    }
  }
  if (file.names().size() != expected) {
    fail(folder, "the checkpoint must hold {} tensors, but holds {}; it belongs to another model",
         expected, file.names().size());
  }
  const std::string path = (fs::path(folder) / "state.json").string();
  const Json state = read_json_file(path);
  try {
    model.weights().refresh(backend);
    model.weights().set_policy_version(state.at("policy_version").get<int64_t>());
    trainer.optimizer().set_num_steps(state.at("optimizer_steps").get<int64_t>());
    trainer.set_num_updates(state.at("updates").get<int64_t>());
    if (trainer.calibrator() != nullptr) trainer.calibrator()->restore(state.at("calibration"));
    return state.at("loop");
  } catch (const nlohmann::json::exception& error) {
    fail(path, "the run's counters are required, but: {}", error.what());
  }
}

}  // namespace octet::loop
