// Sequences of calls kept as CUDA graphs.
#include "backend/cuda/recording.h"

#include "backend/cuda/ops.h"
#include "backend/cuda/status.h"
#include "base/error.h"
#include "base/log.h"

namespace octet::cuda {
namespace {

// Empty after the first run, in which products are searched for and scratch grows; then a graph.
class GraphRecording final : public ops::Recording {
 public:
  // Queues the graph; false where there is none.
  bool launch(Context& context) const {
    if (graph_ == nullptr) return false;
    check(cudaGraphLaunch(graph_.get(), context.stream()), "CUDA graph");
    return true;
  }

  // Makes a graph of `body`; false where its calls cannot be recorded.
  bool capture(Context& context, const std::function<void()>& body) {
    if (!possible_) return false;
    std::string why_not;
    graph_ = record_graph(context, body, why_not);
    possible_ = graph_ != nullptr;
    if (!possible_) log_info("calls that could not be recorded run one by one: {}", why_not);
    return possible_;
  }

 private:
  Graph graph_;
  bool possible_ = true;
};

}  // namespace

Graph record_graph(Context& context, const std::function<void()>& body, std::string& why_not) {
  // Other streams and threads may go on with whatever they do.
  check(cudaStreamBeginCapture(context.stream(), cudaStreamCaptureModeRelaxed), "CUDA graph");
  try {
    body();
  } catch (const std::exception& error) {
    why_not = error.what();
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaError_t status = cudaStreamEndCapture(context.stream(), &graph);
  if (status == cudaSuccess && why_not.empty()) {
    status = cudaGraphInstantiate(&executable, graph, 0);
    if (status != cudaSuccess) executable = nullptr;
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (executable == nullptr) {
    cudaGetLastError();  // what ended the recording is no fault of the calls that follow
    if (why_not.empty()) why_not = cudaGetErrorString(status);
  }
  return Graph(executable);
}

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
