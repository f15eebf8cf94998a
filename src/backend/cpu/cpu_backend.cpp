#include "backend/cpu/cpu_backend.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "backend/cpu/ops.h"

namespace octet::cpu {
namespace {

using tensor::TensorView;

class CpuBackend final : public ops::Backend {
 public:
  explicit CpuBackend(const CpuOptions& options)
      : context_(options.num_threads, options.isa), allocator_(options.memory_limit_bytes) {}

  std::string name() const override { return fmt::format("cpu ({})", isa_name(context_.isa)); }
  tensor::Allocator& allocator() override { return allocator_; }

  void upload(const void* host, const TensorView& to) override {
    OCTET_ASSERT(to.contiguous());
    std::memcpy(to.data, host, static_cast<size_t>(to.num_bytes()));
  }
  void upload_pieces(const TensorView& to, const ReadPiece& read) override {
    constexpr int64_t kPieceBytes = int64_t{1} << 20;
    OCTET_ASSERT(to.contiguous());
    context_.pool.parallel_for(to.num_bytes(), kPieceBytes, [&](int64_t begin, int64_t end, int) {
      read(begin, {to.as<uint8_t>() + begin, to.as<uint8_t>() + end});
    });
  }
  void download(const TensorView& from, void* host) override {
    OCTET_ASSERT(from.contiguous());
    std::memcpy(host, from.data, static_cast<size_t>(from.num_bytes()));
  }
  int64_t begin_download(const TensorView& from) override {
    const int64_t ticket = num_downloads_++;
    std::vector<char>& copy = downloads_[static_cast<size_t>(ticket % kMaxDownloads)];
    copy.resize(static_cast<size_t>(from.num_bytes()));
    download(from, copy.data());
    return ticket;
  }
  void end_download(int64_t ticket, void* host) override {
    OCTET_ASSERT(ticket < num_downloads_ && ticket >= num_downloads_ - kMaxDownloads);
    const std::vector<char>& copy = downloads_[static_cast<size_t>(ticket % kMaxDownloads)];
    std::memcpy(host, copy.data(), copy.size());
  }
  void fill_zero(const TensorView& out) override {
    OCTET_ASSERT(out.contiguous());
    std::memset(out.data, 0, static_cast<size_t>(out.num_bytes()));
  }
  void convert(const TensorView& from, const TensorView& to) override {
    cpu::convert(context_, from, to);
  }
  void synchronize() override {}
  bool is_asynchronous() const override { return false; }
  ops::QuantizeCounters take_quantize_counters() override {
    return std::exchange(context_.counters, {});
  }
  void discount_zeros(int64_t num_elements) override { context_.counters.elements -= num_elements; }

  void quantize(const ops::QuantizeArgs& args) override { cpu::quantize(context_, args); }
  void dequantize(const ops::DequantizeArgs& args) override { cpu::dequantize(context_, args); }
  void linear(const ops::LinearArgs& args) override { cpu::linear(context_, args); }
  void linear_input_grad(const ops::LinearInputGradArgs& args) override {
    cpu::linear_input_grad(context_, args);
  }
  void linear_weight_grad(const ops::LinearWeightGradArgs& args) override {
    cpu::linear_weight_grad(context_, args);
  }
  void embedding(const ops::EmbeddingArgs& args) override { cpu::embedding(context_, args); }
  void embedding_backward(const ops::EmbeddingBackwardArgs& args) override {
    cpu::embedding_backward(context_, args);
  }
  void scatter_rows(const ops::ScatterRowsArgs& args) override {
    cpu::scatter_rows(context_, args);
  }
  void add(const ops::AddArgs& args) override { cpu::add(context_, args); }
  void gated_activation(const ops::GatedActivationArgs& args) override {
    cpu::gated_activation(context_, args);
    quantize_output(args.out, args.quantized);
  }
  void gated_activation_backward(const ops::GatedActivationBackwardArgs& args) override {
    cpu::gated_activation_backward(context_, args);
  }
  void rms_norm(const ops::RmsNormArgs& args) override {
    ops::RmsNormArgs norm = args;
    if (!args.branch.empty()) {
      cpu::add(context_, {args.x, args.branch, args.sum});
      norm.x = args.sum;
    }
    cpu::rms_norm(context_, norm);
    quantize_output(args.y, args.quantized);
  }
  void rms_norm_backward(const ops::RmsNormBackwardArgs& args) override {
    cpu::rms_norm_backward(context_, args);
  }
  void rope(const ops::RopeArgs& args) override { cpu::rope(context_, args); }
  void kv_append(const ops::KvAppendArgs& args) override { cpu::kv_append(context_, args); }
  void kv_copy(const ops::KvCopyArgs& args) override { cpu::kv_copy(context_, args); }
  void attention(const ops::AttentionArgs& args) override {
    cpu::attention(context_, args);
    quantize_output(args.out, args.quantized);
  }
  void attention_backward(const ops::AttentionBackwardArgs& args) override {
    cpu::attention_backward(context_, args);
  }
  void log_probs(const ops::LogProbsArgs& args) override { cpu::log_probs(context_, args); }
  void log_probs_backward(const ops::LogProbsBackwardArgs& args) override {
    cpu::log_probs_backward(context_, args);
  }
  void sample(const ops::SampleArgs& args) override { cpu::sample(context_, args); }
  void adamw(const ops::AdamWArgs& args) override { cpu::adamw(context_, args); }
  ops::SquaredNorm squared_norm(const TensorView& x) override {
    return cpu::squared_norm(context_, x);
  }

 private:
  Context context_;
  tensor::HostAllocator allocator_;
  std::array<std::vector<char>, kMaxDownloads> downloads_;
  int64_t num_downloads_ = 0;
};

}  // namespace

std::unique_ptr<ops::Backend> make_cpu_backend(const CpuOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace octet::cpu
