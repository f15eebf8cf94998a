#include "text/chat_template.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace octet::text {
namespace {

std::string render(const std::string& source, const Json& kwargs = Json::object()) {
  static const Json messages = {{{"role", "user"}, {"content", "Hi"}},
                                {{"role", "assistant"}, {"content", "Yo"}}};
  return ChatTemplate::parse(source, "chat").render({.messages = messages, .kwargs = &kwargs});
}

std::string error_of(const std::string& source) {
  try {
    return "no error: " + render(source);
  } catch (const Error& error) {
    return error.what();
  }
}

// Expected texts below were checked against Jinja 3.1 with transformers' settings.
TEST(ChatTemplate, TrimsBlocksAsTransformersDoes) {
  EXPECT_EQ(render("a\n  {% if true %}\n  b\n  {%- endif %}\n\n  c {# x #}\nd\n"), "a\n  b\n  c d");
  EXPECT_EQ(render("{%+ if true %} x {% endif +%}\n  {{- ' y ' -}}  z"), " x  y z");
  EXPECT_EQ(render("{% raw %}{{ x }}{% endraw %}|{{ \"{{\" }}"), "{{ x }}|{{");
}

TEST(ChatTemplate, CalculatesAsPython) {
  EXPECT_EQ(
      render("{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 5 }} {{ 7 / 2 }} {{ 2 ** 3 ** 2 }} {{ 1e16 }}"),
      "3 -4 3 3.5 64 1e+16");
  EXPECT_EQ(render("{{ [1, 'a', none, true, 0.1 + 0.2] }} {{ {'k': (1,)} }}"),
            "[1, 'a', None, True, 0.30000000000000004] {'k': (1,)}");
  EXPECT_EQ(
      render("{{ 'héllo'[::-1] }} {{ 'héllo'[1:3] }} {{ [1,2,3][-2:] }} {{ [1,2,3,4][3:0:-2] }}"),
      "olléh él [2, 3] [4, 2]");
  EXPECT_EQ(render("{{ 1 < 2 < 3 }}{{ not 1 == 2 }}{{ 'a' ~ 1 + 2 if false else 'b' ~ 1 }}"),
            "TrueTrueb1");
  EXPECT_EQ(render("{{ x }}{{ x is defined }}{{ x | default('d') }}{{ 'i' in x }}"), "FalsedFalse");
}

TEST(ChatTemplate, ScopesLoopsAndNamespaces) {
  EXPECT_EQ(render("{% set ns = namespace(n=0) %}{% set v = 1 %}{% for i in range(4) if i != 1 %}"
                   "{% set ns.n = ns.n + i %}{% set v = v + i %}{{ loop.index }}{{ v }}"
                   "{{ ',' if not loop.last }}{% endfor %};{{ ns.n }}{{ v }}"),
            "11,23,34;51");
  EXPECT_EQ(render("{% for m in messages %}{{ m.role }}{% if loop.first %}{% continue %}{% endif %}"
                   "{% break %}{% endfor %}{% for x in [] %}{% else %}none{% endfor %}"),
            "userassistantnone");
  EXPECT_EQ(render("{% macro m(a, b='x') %}<{{ a }}{{ b }}{{ caller() if caller is defined }}>"
                   "{% endmacro %}{{ m(1) }}{{ m(b=2, a=3) }}{% call m('c') %}in{% endcall %}"),
            "<1x><32><cxin>");
  EXPECT_EQ(
      render("{% set a %}x{{ 1 }}{% endset %}{% filter upper %}{{ a }}{% endfilter %}"
             "{% with b = 2 %}{{ b }}{% endwith %}{{ b }}{% generation %}g{% endgeneration %}"),
      "X12g");
}

TEST(ChatTemplate, WritesJsonAsPython) {
  const Json value = {{"a", {1, 2.0, nullptr, true}}, {"b", "é\n\"\u0001"}, {"c", Json::object()}};
  EXPECT_EQ(render("{{ v | tojson }}", {{"v", value}}),
            R"({"a": [1, 2.0, null, true], "b": "é\n\"\u0001", "c": {}})");
  EXPECT_EQ(render("{{ v | tojson(indent=2) }}", {{"v", {{"a", {1}}, {"c", Json::array()}}}}),
            "{\n  \"a\": [\n    1\n  ],\n  \"c\": []\n}");
}

TEST(ChatTemplate, FiltersAndTests) {
  EXPECT_EQ(
      render("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') "
             "| join('-') }}{{ messages | rejectattr('role', 'in', ['user']) | list | length }}"),
      "Hi1");
  EXPECT_EQ(render("{{ {'b': 1, 'a': 2} | dictsort }}{{ ['b', 'A'] | sort }}{{ 'a b'.split() }}"
                   "{{ '  x' | trim }}{{ 'x\ny' | indent(2) }}"),
            "[('a', 2), ('b', 1)]['A', 'b']['a', 'b']xx\n  y");
  EXPECT_EQ(render("{{ 3 is odd }}{{ 'a' is string }}{{ messages is iterable }}{{ {} is mapping }}"
                   "{{ none is not none }}{{ 6 is divisibleby 3 }}"),
            "TrueTrueTrueTrueFalseTrue");
}

TEST(ChatTemplate, PassesItsInputs) {
  const ChatTemplate chat = ChatTemplate::parse(
      "{{ bos_token }}{{ messages[0].content }}{% if tools %}{{ tools[0].name }}{% endif %}"
      "{{ '>' if add_generation_prompt }}{{ eos_token }}{{ x }}",
      "chat");
  const Json messages = {{{"role", "user"}, {"content", "Hi"}}};
  const Json tools = {{{"name", "f"}}}, kwargs = {{"x", 5}};
  EXPECT_EQ(chat.render({.messages = messages}), "Hi");
  EXPECT_EQ(chat.render({.messages = messages,
                         .add_generation_prompt = true,
                         .tools = &tools,
                         .kwargs = &kwargs,
                         .bos_token = "<s>",
                         .eos_token = "</s>"}),
            "<s>Hif></s>5");
}

TEST(ChatTemplate, ErrorsNameTheLine) {
  const auto starts = [](const std::string& source, std::string_view start) {
    const std::string error = error_of(source);
    EXPECT_TRUE(error.starts_with(start)) << error;
  };
  starts("\n{{ raise_exception('roles must alternate') }}", "[chat] line 2: roles must alternate");
  starts("a\n\n{{ x.y }}", "[chat] line 3: \"x\" is undefined");
  starts("{{ 1 | nothing }}", "[chat] line 1: there is no filter \"nothing\"");
  starts("\n{{ 1 is nothing }}", "[chat] line 2: there is no test \"nothing\"");
  starts("{{ nothing(1) }}", "[chat] line 1: \"nothing\" is undefined and cannot be called");
  starts("{{ 'a'.format(1) }}", "[chat] line 1: \"format\" is undefined");
  starts("{% include 'x' %}", "[chat] line 1: there is no statement \"include\"");
  starts("{% if x %}\n", "[chat] line 1: ");
  starts("{{ 'a' + 1 }}", "[chat] line 1: \"+\" does not work between string and integer");
  starts("{{ 9223372036854775807 + 1 }}", "[chat] line 1: integers must fit 64 bits");
  starts("{{ -9223372036854775807 - 2 }}", "[chat] line 1: integers must fit 64 bits");
  starts("{{ 1 % 0 }}", "[chat] line 1: division by zero");
  starts("{% break %}", "[chat] line 1: \"break\" stands in no loop");
  starts("{{ x", "[chat] line 1: \"{{\" has no");
}

TEST(ChatTemplate, HostileTemplatesEndInAnError) {
  const auto nested = [](int count, std::string open, std::string inner, std::string close) {
    std::string text;
    for (int i = 0; i < count; ++i) text += open;
    text += inner;
    for (int i = 0; i < count; ++i) text += close;
    return text;
  };
  const std::vector<std::string> sources = {
      "{{ " + nested(100000, "(", "1", ")") + " }}",
      "{{ " + nested(100000, "[", "1", "]") + " }}",
      "{{ " + nested(100000, "not ", "1", "") + " }}",
      "{{ " + nested(100000, "-", "1", "") + " }}",
      "{{ 1" + nested(100000, "+1", "", "") + " }}",
      "{{ x" + nested(100000, ".x", "", "") + " }}",
      "{{ x" + nested(100000, "|trim", "", "") + " }}",
      nested(100000, "{% if 1 %}", "", "{% endif %}"),
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
      "{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
      "{{ 'x' * 1000000000000 }}",
      "{{ range(1000000000) }}",
      "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% "
      "endfor %}",
      "{% set ns = namespace(s=[]) %}{% for i in range(1000) %}{% set ns.s = [ns.s] %}{% endfor %}",
      "{% set ns = namespace(a=1, b=1) %}{% for i in range(90) %}{% set ns.a = [ns.a, ns.a] %}"
      "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
      "{% set ns = namespace(a=1) %}{% for i in range(90) %}{% set ns.a = [ns.a, ns.a] %}{% endfor "
      "%}"
      "{{ ns.a }}",
      "{% set ns = namespace(a=1) %}{% set ns.a = ns %}",
      "{% set l = range(100000) | list %}{{ l | reject('in', l) | list }}",
      "{{ ('ab' * 10000000).replace('', 'xxxxxxxxx') }}",
      "{{ ('a ' * 30000000).split() }}",
      "{{ 2 ** 100000000000 }}",
  };
  for (const std::string& source : sources) {
    EXPECT_TRUE(error_of(source).starts_with("[chat] line 1: ")) << source.substr(0, 100) << "\n"
                                                                 << error_of(source).substr(0, 200);
  }
}

// Any prefix and any damaged copy of a template gives a text or an error.
TEST(ChatTemplate, DamagedTemplatesDoNotCrash) {
  const std::string source =
      "{%- set ns = namespace(a=[1, 2.5e3]) -%}{# c #}{% for k, v in {'a': 'b\\n'}.items() if v %}"
      "{{ loop.index0 ~ k[::-1] | upper }}{% else %}x{% endfor %}{% macro m(a=1) %}{{ a }}"
      "{% endmacro %}{{ m(a=2) if ns.a is defined and not none else [(1,), -3 ** 2] }}";
  const std::string letters = "{}%#()[]|.,:'\"=~-+ a1\n";
  for (size_t i = 0; i < source.size(); ++i) {
    error_of(source.substr(0, i));
    std::string damaged = source;
    damaged[i] = letters[i % letters.size()];
    error_of(damaged);
    damaged.erase(i, 1);
    error_of(damaged);
  }
  EXPECT_EQ(error_of(source), "no error: 0A2");
}

}  // namespace
}  // namespace octet::text
