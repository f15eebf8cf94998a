#include <optional>

#include <fmt/format.h>

#include "app/commands.h"
#include "app/line_input.h"
#include "app/output.h"
#include "base/error.h"
#include "base/strings.h"

namespace octet::app {
namespace {

class LineTokenizer {
 public:
  explicit LineTokenizer(const TokenizeArguments& arguments)
      : arguments_(arguments), tokenizer_(text::Tokenizer::load(arguments.tokenizer)) {
    if (!arguments.chat_template.empty()) {
      template_ =
          text::ChatTemplate::parse(read_file(arguments.chat_template), arguments.chat_template);
    } else if (const std::string* source = tokenizer_.chat_template()) {
      template_ = text::ChatTemplate::parse(*source, arguments.tokenizer + " (chat template)");
    }
  }

  std::string operator()(const std::string& source, const std::string& where) const {
    const Line line(source, where, tokenizer_.size());
    const bool json = arguments_.input.json;
    text::EncodeOptions encode{.add_special_tokens = arguments_.add_special_tokens,
                               .parse_special = !arguments_.no_parse_special};
    switch (line.kind) {
      case LineKind::kIds: {
        const std::string text =
            tokenizer_.decode(line.ids, {.skip_special_tokens = arguments_.skip_special_tokens});
        return json ? "{\"text\":" + json_string(text) + "}" : text;
      }
      case LineKind::kText: {
        const std::vector<int32_t> ids = tokenizer_.encode(line.text, encode);
        return json ? "{\"ids\":" + json_ids(ids) + "}" : fmt::format("{}", fmt::join(ids, " "));
      }
      case LineKind::kMessages:
        break;
    }
    const std::string text =
        render_line(line, &tokenizer_, template_ ? &*template_ : nullptr, false);
    const std::vector<int32_t> ids = tokenizer_.encode(text, encode);
    return json ? "{\"text\":" + json_string(text) + ",\"ids\":" + json_ids(ids) + "}" : text;
  }

 private:
  const TokenizeArguments& arguments_;
  text::Tokenizer tokenizer_;
  std::optional<text::ChatTemplate> template_;
};

}  // namespace

int run_tokenize(const TokenizeArguments& arguments) {
  const LineTokenizer tokenize(arguments);
  int exit_code = 0;
  for_each_line(arguments.input, [&](const std::string& line, const std::string& where) {
    std::string answer;
    try {
      answer = tokenize(line, where);
    } catch (const Error& error) {
      exit_code = 1;
      answer = report_line_error(message_at(where, error), arguments.input.json);
    }
    print_line(answer);
  });
  return exit_code;
}

}  // namespace octet::app
