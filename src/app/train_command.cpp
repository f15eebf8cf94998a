#include "app/commands.h"
#include "base/error.h"

namespace octet::app {

int run_train(const TrainArguments&) { fail("train", "not built yet"); }

}  // namespace octet::app
