// The command line: the only place that knows how it is parsed.
#pragma once

namespace octet::app {

// Parses and runs one command; returns its exit code. Throws UsageError for a command line that
// cannot be used, naming the nearest command or flag, and whatever the command throws.
int run_command_line(int argc, char** argv);

}  // namespace octet::app
