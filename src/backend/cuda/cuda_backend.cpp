#include "backend/cuda/cuda_backend.h"

#include <fmt/format.h>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "base/error.h"

namespace octet::cuda {
namespace {

using tensor::TensorView;

constexpr int kBuiltFor = 90;  // sm_90a runs on compute capability 9.0 alone

class CudaBackend final : public ops::Backend {
 public:
  CudaBackend(const CudaOptions& options, std::string name)
      : name_(std::move(name)), context_(options.device, options.memory_limit_bytes) {}

  std::string name() const override { return name_; }
  tensor::Allocator& allocator() override { return context_.allocator(); }

  void upload(const void* host, const TensorView& to) override {
    OCTET_ASSERT(to.contiguous());
    context_.upload(host, to.data, to.num_bytes());
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
    cuda::gated_activation(context_, args);
    quantize_output(args.out, args.quantized);
  }
  void gated_activation_backward(const ops::GatedActivationBackwardArgs& args) override {
    cuda::gated_activation_backward(context_, args);
  }
  void rms_norm(const ops::RmsNormArgs& args) override {
    ops::RmsNormArgs norm = args;
    if (!args.branch.empty()) {
      cuda::add(context_, {args.x, args.branch, args.sum});
      norm.x = args.sum;
    }
    cuda::rms_norm(context_, norm);
    quantize_output(args.y, args.quantized);
  }
  void rms_norm_backward(const ops::RmsNormBackwardArgs& args) override {
    cuda::rms_norm_backward(context_, args);
  }
  void rope(const ops::RopeArgs& args) override { cuda::rope(context_, args); }
  void kv_append(const ops::KvAppendArgs& args) override { cuda::kv_append(context_, args); }
  void kv_copy(const ops::KvCopyArgs& args) override { cuda::kv_copy(context_, args); }
  void attention(const ops::AttentionArgs& args) override {
    cuda::attention(context_, args);
    quantize_output(args.out, args.quantized);
  }
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
    const int capability = 10 * properties.major + properties.minor;
    found.push_back({index, properties.name, capability,
                     static_cast<int64_t>(properties.totalGlobalMem), capability == kBuiltFor});
  }
  if (found.empty()) why_none = "the driver shows no device";
  return found;
}

std::string describe_libraries() { return LibraryProducts().description(); }

std::unique_ptr<ops::Backend> make_cuda_backend(const CudaOptions& options) {
  std::string why_none;
  const std::vector<DeviceInfo> all = devices(why_none);
  if (options.device < 0 || options.device >= static_cast<int>(all.size())) {
    fail("CUDA device", "cuda:{} is not there: {}", options.device,
         all.empty() ? why_none : fmt::format("the driver shows {} device(s)", all.size()));
  }
  const DeviceInfo& info = all[static_cast<size_t>(options.device)];
  if (!info.usable) {
    fail("CUDA device",
         "this build has kernels for compute capability 9.0 (Hopper), but {} has {}.{}; use "
         "--device cpu",
         info.name, info.capability / 10, info.capability % 10);
  }
  return std::make_unique<CudaBackend>(
      options, fmt::format("cuda:{} ({}, sm_90a)", options.device, info.name));
}

}  // namespace octet::cuda
