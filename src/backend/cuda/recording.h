// CUDA graphs of queued calls.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "backend/cuda/context.h"

namespace octet::cuda {

struct DestroyGraph {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraphExec_st, DestroyGraph>;

// A graph of what `body` queues, which is not run; null where it cannot be recorded, for the reason
// in `why_not`. Scratch grows in place, so that what a graph points to stays where it is.
Graph record_graph(Context& context, const std::function<void()>& body, std::string& why_not);

}  // namespace octet::cuda
