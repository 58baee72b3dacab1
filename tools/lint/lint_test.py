"""Shows that each check can fail, and that what is right passes. Run by ctest as lint.self."""

import re
import sys
import tempfile
import tomllib
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent))

import lint
from source import Source, blank_cpp, find_functions

CONFIG = tomllib.loads(Path(__file__).with_name("layers.toml").read_text())
HEADER = "#pragma once\n"


class LintTest(unittest.TestCase):
    def problems(self, files, **changes):
        """The problems of a tree with these files, as 'check path message' lines."""
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
            found = lint.lint(folder, {**CONFIG, "waivers": {}, **changes})
        return [f"{p.check} {p.path}:{p.line} {p.message}" for p in found]

    def assert_found(self, pattern, files, **changes):
        found = self.problems(files, **changes)
        self.assertTrue(any(re.search(pattern, line) for line in found), f"{pattern} not in {found}")

    def assert_clean(self, files, **changes):
        self.assertEqual(self.problems(files, **changes), [])

    def test_layer_above(self):
        upper = {"src/engine/engine.h": HEADER, "src/server/x.cc": '#include "engine/engine.h"\n'}
        self.assert_clean(upper)
        self.assert_found(
            "layers src/cache/x.cc:1 cache may not include engine/engine.h",
            {**upper, "src/cache/x.cc": '#include "engine/engine.h"\n'},
        )

    def test_layer_unknown_and_cycle(self):
        self.assert_found("src/utils is not a layer", {"src/utils/x.cc": "int x;\n"})
        self.assert_found("cycle: a -> b -> a", {"src/a/x.cc": "int x;\n"}, layers={"a": ["b"], "b": ["a"]})
        self.assert_found("not a file of src", {"src/base/x.cc": '#include "base/gone.h"\n'})

    def test_private_header(self):
        deep = {
            "src/cache/tiers/store.h": HEADER,
            "src/cache/tiers/store.cc": '#include "cache/tiers/store.h"\n',
        }
        self.assert_clean(deep)
        self.assert_found(
            "private to its layer", {**deep, "src/sched/x.cc": '#include "cache/tiers/store.h"\n'}
        )

    def test_device_headers_only_in_tiers(self):
        device = {"src/device/buffer.h": HEADER, "src/cache/tiers/copy.cc": '#include "device/buffer.h"\n'}
        self.assert_clean(device)
        self.assert_found(
            "cache may not include device", {**device, "src/cache/x.cc": '#include "device/buffer.h"\n'}
        )

    def test_external_headers(self):
        self.assert_clean({"src/ops/x.cc": "#include <cuda_runtime.h>\n"})
        self.assert_found("external src/sched/x.cc:1", {"src/sched/x.cc": "#include <cuda_runtime.h>\n"})
        self.assert_found("external src/text/x.cc:1", {"src/text/x.cc": "#include <nlohmann/json.hpp>\n"})

    def test_external_units(self):
        beast = {"src/server/http_a.h": HEADER + "#include <boost/beast.hpp>\n"}
        units = {f"src/server/u{i}.cc": '#include "server/http_a.h"\n' for i in range(4)}
        self.assert_clean({**beast, **units})
        self.assert_found(
            "5 translation units reach",
            {**beast, **units, "src/server/u4.cc": '#include "server/http_a.h"\n'},
        )

    def test_public_headers(self):
        headers = {f"src/text/h{i}.h": HEADER for i in range(13)}
        users = "".join(f'#include "text/h{i}.h"\n' for i in range(13))
        self.assert_found("13 public headers", {**headers, "src/text/x.cc": users})

    def test_file_size(self):
        self.assert_clean({"src/base/x.cc": "\n" * 599 + "int x;\n"})
        self.assert_found("size src/base/x.cc:1 file: 601 lines", {"src/base/x.cc": "\n" * 600 + "int x;\n"})

    def test_function_size(self):
        body = "int f() {\n" + "    ;\n" * 68 + "}\n"
        self.assert_clean({"src/base/x.cc": body})
        self.assert_found("function f: 71 lines", {"src/base/x.cc": body.replace("}", "    ;\n}")})
        self.assert_found("function f: 71 lines", {"run": "", "tools/f.py": "def f():\n" + "    pass\n" * 70})

    def test_parameters(self):
        self.assert_clean({"src/base/x.cc": "void f(int a, int b, int c, int d, M<int, int> e) {}\n"})
        self.assert_found(
            "has 6 parameters", {"src/base/x.cc": "void f(int a, int b, int c, int d, int e, int g) {}\n"}
        )

    def test_waivers_only_shrink(self):
        large = {"src/base/x.cc": "\n" * 700 + "int x;\n"}
        self.assert_clean(large, waivers={"src/base/x.cc": 701})
        self.assert_found("its waiver says 700", large, waivers={"src/base/x.cc": 700})
        self.assert_found("shrank below its waiver of 800: write 701", large, waivers={"src/base/x.cc": 800})
        self.assert_found("for nothing", {"src/base/x.cc": "int x;\n"}, waivers={"src/base/gone.cc": 700})

    def test_every_code_word(self):
        samples = [
            "auto* p = new int;",
            "delete p;",
            "void* p = malloc(1);",
            "cudaMemset(p, 0, n);",
            'auto* p = getenv("X");',
            "#define F(x) x",
            "auto* p = NULL;",
            "using namespace std;",
            "typedef int x;",
            "throw 1;",
            "assert(x);",
            "std::cout << 1;",
            'printf("x");',
            "int x = rand();",
            "std::regex r;",
            "t.detach();",
            "sprintf(b, s);",
        ]
        for sample in samples:
            with self.subTest(sample):
                self.assert_found("words src/base/x.cc:1 .*banned; use", {"src/base/x.cc": sample + "\n"})
                self.assert_clean({"src/base/x.cc": f"// {sample}\n" if "#" not in sample else "int x;\n"})

    def test_code_words_that_are_fine(self):
        self.assert_clean(
            {
                "src/base/x.cc": 'X(const X&) = delete;\nint renew = 1;\nauto s = "new NULL";\nstatic_assert(true);\n'
            }
        )
        self.assert_clean({"src/device/x.cc": "void* p = aligned_alloc(64, n);\n"})
        self.assert_clean({"apps/tessera/x.cc": 'auto* p = getenv("X");\n'})

    def test_every_text_word(self):
        samples = [
            "TO" + "DO: later",
            "see /wor" + "k/x",
            "from py" + "pi.org",
            "see desig" + "n.md",
            "as issu" + "e 3 says",
        ]
        for sample in samples:
            with self.subTest(sample):
                self.assert_found("words README.md:1 .*banned; use", {"README.md": sample + "\n"})
        self.assert_found(
            "words web/x.js",
            {"web/x.js": "a.inner" + "HTML = b;\n", "web/index.html": "x.js\n", "r.md": "index.html r.md\n"},
        )

    def test_blanks(self):
        self.assert_found("blanks README.md:1 blanks at the end", {"README.md": "x \n"})
        self.assert_found("a tab", {"src/base/x.cc": "\tint x;\n"})
        self.assert_found("end with one newline", {"README.md": "x"})
        self.assert_found("end with one newline", {"README.md": "x\n\n"})

    def test_pragma_once(self):
        self.assert_found("needs #pragma once", {"src/base/x.h": "int x;\n"})

    def test_dead_files(self):
        self.assert_found("dead src/base/x.h:1", {"src/base/x.h": HEADER})
        self.assert_found("dead tools/x.py:1", {"tools/x.py": "x = 1\n"})
        self.assert_found("dead docs/x.md:1", {"docs/x.md": "x\n"})
        self.assert_found("dead bench/x.cc:1", {"bench/x.cc": "int x;\n"})
        self.assert_clean({"docs/x.md": "x\n", "README.md": "[x](docs/x.md)\n"})

    def test_root(self):
        self.assert_found("root NOTE:1", {"NOTE": "to do\n"})

    def test_assertions(self):
        self.assert_found("test A.b asserts nothing", {"src/base/x_test.cc": "TEST(A, b) {\n    run();\n}\n"})
        self.assert_clean(
            {
                "src/base/x_test.cc": "void same() {\n    EXPECT_EQ(1, 1);\n}\nvoid both() {\n    same();\n}\n\n"
                "TEST(A, b) {\n    both();\n}\n"
            }
        )
        self.assert_found("asserts nothing", {"tests/e2e/test_x.py": "def test_x():\n    pass\n"})

    def test_links(self):
        self.assert_found("docs/x.md points nowhere", {"README.md": "[x](docs/x.md)\n"})
        self.assert_found("docs/y.md does not exist", {"src/base/x.cc": "// see docs/y.md\nint x;\n"})
        self.assert_found("no such heading", {"README.md": "# A b\n[x](#c)\n"})
        self.assert_clean({"README.md": "# A b\n[x](#a-b) `[y](z)`\n"})

    def test_format(self):
        if lint.check_format.shutil.which("clang-format-19") is None:
            self.skipTest("clang-format-19 is not installed")
        self.assert_found(
            "format src/base/x.cc:1",
            {".clang-format": "BasedOnStyle: Google\n", "src/base/x.cc": "int  x;\n"},
        )

    def test_layers_of_the_project(self):
        """Every layer that the build knows is in the table, in the same order."""
        root = Path(__file__).parents[2]
        built = re.search(r"foreach\(layer ([\w ]+)\)", (root / "src/CMakeLists.txt").read_text())[1].split()
        self.assertEqual(sorted(built), sorted(CONFIG["layers"]))


class FunctionsTest(unittest.TestCase):
    def names(self, code):
        return [(f.name, f.lines, f.parameters) for f in find_functions(blank_cpp(code))]

    def test_kinds(self):
        code = """namespace a {
class B : public C {
  public:
    B(int x, int y) : x_(x), y_{y}, z_{} {
        ;
    }
    bool operator==(const B&) const = default;
    int get() const { return x_; }

  private:
    int x_{1};
    std::array<int, 2> y_ = {1, 2};
};
enum class E { kA, kB };
constexpr int kTable[] = {1, 2};
template <typename T>
auto f(std::function<int(int, int)> g, T t) -> int {
    auto h = [](int) {
        return 1;
    };
    if (t) {
    }
}
struct S f2(void) { return {}; }
}  // namespace a
"""
        self.assertEqual(self.names(code)[:3], [("B", 3, 2), ("get", 1, 0), ("f", 8, 2)])

    def test_braces_in_literals(self):
        self.assertEqual(self.names('void f() {\n    g("}", \'}\', R"(})");  // }\n}\n'), [("f", 3, 0)])

    def test_digit_separators(self):
        self.assertEqual(self.names("void f() {\n    int x = 1'000'000;\n}\n"), [("f", 3, 0)])

    def test_source_reads_includes(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "x.cc").write_text('#include <a>\n// #include <c>\n#include "b/c.h"\n')
            self.assertEqual(Source(Path(folder), "x.cc").includes, [(1, "a", False), (3, "b/c.h", True)])


if __name__ == "__main__":
    unittest.main()
