// The commands. Each returns the exit code (0 done, 1 where a line could not be served) and throws
// Error or UsageError for what ends it.
#pragma once

#include "app/arguments.h"

namespace octet::app {

int run_score(const ScoreArguments& arguments);
int run_generate(const GenerateArguments& arguments);
int run_tokenize(const TokenizeArguments& arguments);
int run_import(const ImportArguments& arguments);
int run_doctor(const DoctorArguments& arguments);
int run_bench(const BenchArguments& arguments);
int run_train(const TrainArguments& arguments);

}  // namespace octet::app
