// Values as text: Python's repr() and json.dumps.
#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "text/jinja/value.h"
#include "text/utf8.h"

namespace octet::text::jinja {
namespace {

void check_size(const std::string& out) {
  if (out.size() > kMaxBytes) value_error("a text grew beyond {} bytes", kMaxBytes);
}

// Python quotes with ' unless the text has ' but no ".
void append_quoted(std::string& out, std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == quote || c == '\\') {
      out.append(1, '\\').append(1, c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  out += quote;
}

void append_repr(std::string& out, const Value& value) {
  check_size(out);
  if (const std::string* text = value.string()) {
    append_quoted(out, *text);
  } else if (const auto* list = value.get<std::shared_ptr<const List>>()) {
    const auto& items = (*list)->items;
    out += (*list)->is_tuple ? '(' : '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += ", ";
      append_repr(out, items[i]);
    }
    if ((*list)->is_tuple && items.size() == 1) out += ',';
    out += (*list)->is_tuple ? ')' : ']';
  } else if (const Dict* dict = value.dict()) {
    out += '{';
    for (size_t i = 0; i < dict->items.size(); ++i) {
      if (i > 0) out += ", ";
      append_quoted(out, dict->items[i].first);
      out += ": ";
      append_repr(out, dict->items[i].second);
    }
    out += '}';
  } else if (const auto* boolean = value.get<bool>()) {
    out += *boolean ? "True" : "False";
  } else if (const auto* integer = value.get<int64_t>()) {
    out += fmt::format("{}", *integer);
  } else if (const auto* number = value.get<double>()) {
    out += float_text(*number);
  } else if (value.is_none()) {
    out += "None";
  } else {
    out += value.is_undefined() ? "Undefined" : fmt::format("<{}>", value.type_name());
  }
}

void append_json_string(std::string& out, std::string_view text, bool ensure_ascii) {
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const CodePoint next = code_point_at(text, i);
    const char32_t c = next.value;
    constexpr std::string_view kNamed = "\"\\\n\r\t\b\f";
    const size_t named = c < 0x80 ? kNamed.find(static_cast<char>(c)) : std::string_view::npos;
    if (named != std::string_view::npos) {
      out.append(1, '\\').append(1, "\"\\nrtbf"[named]);
    } else if (c >= 0x10000 && ensure_ascii) {
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((c - 0x10000) >> 10),
                         0xDC00 + ((c - 0x10000) & 0x3FF));
    } else if (c < 0x20 || (ensure_ascii && c >= 0x7F + 1)) {
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
    } else {
      append_utf8(out, c);
    }
    i += next.length;
  }
  out += '"';
}

void append_json(std::string& out, const Value& value, const JsonStyle& style, int level) {
  check_size(out);
  const auto new_line = [&](int depth) {
    if (style.indent >= 0) {
      out.append(1, '\n').append(static_cast<size_t>(style.indent) * static_cast<size_t>(depth),
                                 ' ');
    }
  };
  const auto append_all = [&](char open, char close, size_t count, const auto& append_one) {
    out += open;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) out += style.item_separator;
      new_line(level + 1);
      append_one(i);
    }
    if (count > 0) new_line(level);
    out += close;
  };
  if (const std::string* text = value.string()) {
    append_json_string(out, *text, style.ensure_ascii);
  } else if (const auto* items = value.items()) {
    append_all('[', ']', items->size(),
               [&](size_t i) { append_json(out, (*items)[i], style, level + 1); });
  } else if (const Dict* dict = value.dict()) {
    std::vector<const std::pair<std::string, Value>*> entries;
    for (const auto& entry : dict->items) entries.push_back(&entry);
    if (style.sort_keys) {
      std::sort(entries.begin(), entries.end(),
                [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    append_all('{', '}', entries.size(), [&](size_t i) {
      append_json_string(out, entries[i]->first, style.ensure_ascii);
      out += style.key_separator;
      append_json(out, entries[i]->second, style, level + 1);
    });
  } else if (const auto* boolean = value.get<bool>()) {
    out += *boolean ? "true" : "false";
  } else if (const auto* integer = value.get<int64_t>()) {
    out += fmt::format("{}", *integer);
  } else if (const auto* number = value.get<double>()) {
    out += std::isnan(*number)   ? "NaN"
           : std::isinf(*number) ? (*number > 0 ? "Infinity" : "-Infinity")
                                 : float_text(*number);
  } else if (value.is_none()) {
    out += "null";
  } else {
    value_error("JSON cannot hold a value that is {}", value.type_name());
  }
}

}  // namespace

std::string Value::repr() const {
  std::string out;
  append_repr(out, *this);
  return out;
}

std::string to_json(const Value& value, const JsonStyle& style) {
  std::string out;
  append_json(out, value, style, 0);
  return out;
}

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto to_text = [&](std::chars_format format) {
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, format).ptr;
    return std::string(buffer, end);
  };
  const double magnitude = std::fabs(value);
  // Python writes an exponent below 1e-4 and from 1e16 on.
  if (magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e16)) {
    return to_text(std::chars_format::scientific);
  }
  std::string text = to_text(std::chars_format::fixed);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

}  // namespace octet::text::jinja
