#include "backend/cuda/cuda_backend.h"

#include <map>

#include <fmt/format.h>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/fused.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "backend/cuda/workspace.h"
#include "base/error.h"
#include "base/strings.h"

namespace octet::cuda {
namespace {

using tensor::TensorView;

class CudaBackend final : public ops::Backend {
 public:
  CudaBackend(const CudaOptions& options, std::string name)
      : name_(std::move(name)), context_(options.device, options.memory_limit_bytes) {
    if (options.inexact_products) context_.library().set_inexact();
    if (options.portable) context_.force_portable();
  }

  std::string name() const override { return name_; }
  std::string choices() const override { return context_.library().choices(); }
  tensor::Allocator& allocator() override { return context_.allocator(); }
  int64_t prepare_bytes(const ops::WorkspaceShape& shape) override {
    return context_.library().search_bytes(context_, shape);
  }
  void prepare(const ops::WorkspaceShape& shape) override {
    context_.library().prepare(context_, shape);
    context_.drop_scratch();
  }
  std::vector<ops::Workspace> workspaces(const ops::WorkspaceShape& shape) override {
    return cuda::workspaces(context_, shape);
  }
  int64_t device_bytes_in_use() override { return context_.device_bytes_in_use(); }
  int64_t device_peak_bytes() override { return context_.device_peak_bytes(); }

  void upload(const void* host, const TensorView& to) override {
    OCTET_ASSERT(to.contiguous());
    context_.upload(host, to.data, to.num_bytes());
  }
  void upload_pieces(const TensorView& to, const ReadPiece& read) override {
    OCTET_ASSERT(to.contiguous());
    context_.upload_pieces(to.data, to.num_bytes(), read);
  }
  void download(const TensorView& from, void* host) override {
    OCTET_ASSERT(from.contiguous());
    context_.download(from.data, host, from.num_bytes());
  }
  int64_t begin_download(const TensorView& from) override {
    OCTET_ASSERT(from.contiguous());
    return context_.begin_download(from.data, from.num_bytes());
  }
  void end_download(int64_t ticket, void* host) override { context_.end_download(ticket, host); }
  void fill_zero(const TensorView& out) override {
    OCTET_ASSERT(out.contiguous());
    context_.fill_zero(out.data, out.num_bytes());
  }
  void convert(const TensorView& from, const TensorView& to) override {
    cuda::convert(context_, from, to);
  }
  void synchronize() override { context_.synchronize(); }
  double time_seconds(const std::function<void()>& body, int repeats) override {
    return context_.time_seconds(body, repeats);
  }
  bool is_asynchronous() const override { return true; }
  ops::QuantizeCounters take_quantize_counters() override {
    DeviceCounters counters{};
    context_.download(context_.counters(), &counters, sizeof(counters));
    context_.fill_zero(context_.counters(), sizeof(counters));
    return {static_cast<int64_t>(counters.elements) - std::exchange(discounted_, 0),
            static_cast<int64_t>(counters.saturated), static_cast<int64_t>(counters.underflowed),
            static_cast<int64_t>(counters.not_a_number)};
  }
  void discount_zeros(int64_t num_elements) override { discounted_ += num_elements; }

  void quantize(const ops::QuantizeArgs& args) override { cuda::quantize(context_, args); }
  void dequantize(const ops::DequantizeArgs& args) override { cuda::dequantize(context_, args); }
  void linear(const ops::LinearArgs& args) override { cuda::linear(context_, args); }
  void linear_input_grad(const ops::LinearInputGradArgs& args) override {
    cuda::linear_input_grad(context_, args);
  }
  void linear_weight_grad(const ops::LinearWeightGradArgs& args) override {
    cuda::linear_weight_grad(context_, args);
  }
  void embedding(const ops::EmbeddingArgs& args) override { cuda::embedding(context_, args); }
  void embedding_backward(const ops::EmbeddingBackwardArgs& args) override {
    cuda::embedding_backward(context_, args);
  }
  void scatter_rows(const ops::ScatterRowsArgs& args) override {
    cuda::scatter_rows(context_, args);
  }
  void add(const ops::AddArgs& args) override { cuda::add(context_, args); }
  void gated_activation(const ops::GatedActivationArgs& args) override {
    if (fused_gated_activation(context_, args)) return;
    if (args.quantized.empty()) {
      cuda::gated_activation(context_, args);
      return;
    }
    ops::GatedActivationArgs dense = args;
    dense.quantized = {};
    gated_activation(dense);
    quantize_output(args.out, args.quantized);
  }
  void gated_activation_backward(const ops::GatedActivationBackwardArgs& args) override {
    cuda::gated_activation_backward(context_, args);
  }
  void rms_norm(const ops::RmsNormArgs& args) override {
    if (fused_rms_norm(context_, args)) return;
    ops::RmsNormArgs part = args;
    if (!args.quantized.empty()) {
      part.quantized = {};
      rms_norm(part);
      quantize_output(args.y, args.quantized);
    } else if (!args.branch.empty()) {
      add({args.x, args.branch, args.sum});
      part.x = args.sum;
      part.branch = part.sum = {};
      rms_norm(part);
    } else {
      cuda::rms_norm(context_, args);
    }
  }
  void rms_norm_backward(const ops::RmsNormBackwardArgs& args) override {
    cuda::rms_norm_backward(context_, args);
  }
  void rope(const ops::RopeArgs& args) override { cuda::rope(context_, args); }
  void attention_inputs(const ops::AttentionInputsArgs& args) override {
    if (!fused_attention_inputs(context_, args)) Backend::attention_inputs(args);
  }
  void kv_append(const ops::KvAppendArgs& args) override { cuda::kv_append(context_, args); }
  void kv_copy(const ops::KvCopyArgs& args) override { cuda::kv_copy(context_, args); }
  void attention(const ops::AttentionArgs& args) override { cuda::attention(context_, args); }
  void attention_backward(const ops::AttentionBackwardArgs& args) override {
    cuda::attention_backward(context_, args);
  }
  void log_probs(const ops::LogProbsArgs& args) override { cuda::log_probs(context_, args); }
  void log_probs_backward(const ops::LogProbsBackwardArgs& args) override {
    cuda::log_probs_backward(context_, args);
  }
  void sample(const ops::SampleArgs& args) override { cuda::sample(context_, args); }
  void adamw(const ops::AdamWArgs& args) override { cuda::adamw(context_, args); }
  ops::SquaredNorm squared_norm(const TensorView& x) override {
    return cuda::squared_norm(context_, x);
  }
  void run_recorded(std::unique_ptr<ops::Recording>& recording,
                    const std::function<void()>& body) override {
    cuda::run_recorded(context_, recording, body);
  }

 private:
  std::string name_;
  Context context_;
  int64_t discounted_ = 0;  // of the counted elements
};

}  // namespace

std::string architecture_for(int capability, const std::string& architectures) {
  for (const std::string& architecture : split(architectures, ',')) {
    const int number = std::stoi(architecture);
    const bool served = architecture.ends_with('a')
                            ? capability == number
                            : capability / 10 == number / 10 && capability >= number;
    if (served) return architecture;
  }
  return "";
}

std::vector<DeviceInfo> devices(std::string& why_none) {
  std::vector<DeviceInfo> found;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    why_none = cudaGetErrorString(status);
    return found;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    DeviceInfo info;
    info.index = index;
    info.name = properties.name;
    info.capability = 10 * properties.major + properties.minor;
    info.usable = !architecture_for(info.capability, OCTET_CUDA_ARCHITECTURES).empty();
    if (!info.usable) {
      info.why_not = fmt::format(
          "{} has compute capability {}.{}, {}", info.name, properties.major, properties.minor,
          info.capability < 89
              ? "whose matrix units have no FP8: 8.9 is the least"
              : fmt::format("and this build has kernels for sm_{}; cmake --preset cuda-all builds "
                            "for sm_89, sm_90a, sm_100f and sm_120f",
                            fmt::join(split(OCTET_CUDA_ARCHITECTURES, ','), ", sm_")));
    }
    found.push_back(info);
  }
  if (found.empty()) why_none = "the driver shows no device";
  return found;
}

int64_t free_bytes(int device) {
  static std::map<int, int64_t> known;
  if (const auto found = known.find(device); found != known.end()) return found->second;
  size_t free = 0, total = 0;
  check(cudaSetDevice(device), "CUDA device");
  check(cudaMemGetInfo(&free, &total), "device memory");
  return known[device] = static_cast<int64_t>(free);
}

std::string describe_libraries() { return LibraryProducts().description(); }

std::string describe_choices() { return describe_product_choices(); }

std::unique_ptr<ops::Backend> make_cuda_backend(const CudaOptions& options) {
  std::string why_none;
  const std::vector<DeviceInfo> all = devices(why_none);
  if (options.device < 0 || options.device >= static_cast<int>(all.size())) {
    fail("CUDA device", "cuda:{} is not there: {}", options.device,
         all.empty() ? why_none : fmt::format("the driver shows {} device(s)", all.size()));
  }
  const DeviceInfo& info = all[static_cast<size_t>(options.device)];
  if (!info.usable) fail("CUDA device", "{}; use --device cpu", info.why_not);
  return std::make_unique<CudaBackend>(
      options, fmt::format("cuda:{} ({}, sm_{}{})", options.device, info.name,
                           architecture_for(info.capability, OCTET_CUDA_ARCHITECTURES),
                           options.portable ? ", portable" : ""));
}

}  // namespace octet::cuda
