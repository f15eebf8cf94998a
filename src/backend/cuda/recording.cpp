// Sequences of calls kept as CUDA graphs.
#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "base/error.h"
#include "base/log.h"

namespace octet::cuda {
namespace {

// Empty after the first run, in which products are searched for and scratch grows; then a graph.
class GraphRecording final : public ops::Recording {
 public:
  ~GraphRecording() override {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  }
  GraphRecording() = default;
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;

  // Queues the graph; false where there is none.
  bool launch(Context& context) const {
    if (executable_ == nullptr) return false;
    check(cudaGraphLaunch(executable_, context.stream()), "CUDA graph");
    return true;
  }

  // Makes a graph of `body`; false where its calls cannot be recorded. What it points to stays
  // where it is: scratch grows in place.
  bool capture(Context& context, const std::function<void()>& body) {
    if (!possible_) return false;
    // Other streams and threads may go on with whatever they do.
    check(cudaStreamBeginCapture(context.stream(), cudaStreamCaptureModeRelaxed), "CUDA graph");
    std::string why_not;
    try {
      body();
    } catch (const std::exception& error) {
      why_not = error.what();
    }
    cudaGraph_t graph = nullptr;
    cudaError_t status = cudaStreamEndCapture(context.stream(), &graph);
    if (status == cudaSuccess && why_not.empty()) {
      status = cudaGraphInstantiate(&executable_, graph, 0);
      if (status != cudaSuccess) executable_ = nullptr;
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (executable_ != nullptr) return true;
    cudaGetLastError();  // what ended the recording is no fault of the calls that follow
    possible_ = false;
    log_info("calls that could not be recorded run one by one: {}",
             why_not.empty() ? cudaGetErrorString(status) : why_not);
    return false;
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
  bool possible_ = true;
};

}  // namespace

void run_recorded(Context& context, std::unique_ptr<ops::Recording>& recording,
                  const std::function<void()>& body) {
  if (recording == nullptr) {
    body();
    recording = std::make_unique<GraphRecording>();
    return;
  }
  auto& graph = static_cast<GraphRecording&>(*recording);
  if (graph.launch(context)) return;
  if (!graph.capture(context, body) || !graph.launch(context)) body();
}

}  // namespace octet::cuda
