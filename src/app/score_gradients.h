// The gradient that `octet score --gradients` writes.
#pragma once

#include <string>
#include <vector>

#include "app/model_session.h"

namespace octet::app {

// Of the mean negative log-probability over all next tokens of all given sequences, for every
// trained parameter: F32, by the checkpoint's names, or the adapter's as PEFT has them. The session
// must have been loaded for training. Error where there is no next token at all.
void write_gradients(ModelSession& session, const std::vector<Prompt>& prompts, float temperature,
                     const std::string& path);

}  // namespace octet::app
