#!/usr/bin/env python3
"""Tests of compare.py."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402


def line(us, op="moe", shape="T 1", dtype="bfloat16"):
    return json.dumps({"op": op, "shape": shape, "dtype": dtype, "us": us, "peer": None})


class CompareTest(unittest.TestCase):
    def run_on(self, baseline, new, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, lines in (("baseline", baseline), ("new", new)):
                paths.append(os.path.join(folder, name))
                with open(paths[-1], "w") as file:
                    file.write("".join(text + "\n" for text in lines))
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                status = compare.main([*paths, *arguments])
            return status, out.getvalue()

    def test_ten_percent_is_accepted_and_more_is_not(self):
        self.assertEqual(self.run_on([line(100)], [line(109.9)])[0], 0)
        status, out = self.run_on([line(100)], [line(110.1)])
        self.assertEqual(status, 1)
        self.assertIn("SLOWER moe [T 1] bfloat16: 100.00 -> 110.10 us (+10%)", out)

    def test_the_limit_is_an_option(self):
        self.assertEqual(self.run_on([line(100)], [line(120)], "--limit", "0.25")[0], 0)

    def test_cases_are_told_apart_by_op_shape_and_dtype(self):
        baseline = [line(10), line(20, dtype="fp8_e4m3"), line(30, shape="T 8"), line(40, op="linear")]
        new = [line(40, op="linear"), line(30, shape="T 8"), line(20, dtype="fp8_e4m3"), line(10)]
        self.assertEqual(self.run_on(baseline, new)[0], 0)

    def test_the_last_line_of_a_case_counts(self):
        self.assertEqual(self.run_on([line(100), line(50)], [line(80)])[0], 1)

    def test_other_lines_are_passed_over(self):
        other = json.dumps({"task": "decode", "step_us": 4})
        status, out = self.run_on([other, line(10)], ["a word", line(5), line(7, op="sample")])
        self.assertEqual(status, 0)
        self.assertIn("1 cases compared", out)
        self.assertIn("faster moe", out)
        self.assertIn("1 new", out)

    def test_a_broken_line_is_an_error_and_is_named(self):
        status, out = self.run_on([line(10)], [line(10), line(10)[:-5]])
        self.assertEqual(status, 2)
        self.assertIn("line 2", out)

    def test_a_missing_file_is_an_error(self):
        out = io.StringIO()
        with contextlib.redirect_stderr(out):
            self.assertEqual(compare.main(["/nowhere/a", "/nowhere/b"]), 2)
        self.assertIn("/nowhere/a", out.getvalue())

    def test_nothing_in_common_is_an_error(self):
        status, out = self.run_on([line(10)], [line(10, op="sample")])
        self.assertEqual(status, 2)
        self.assertIn("no case in common", out)


if __name__ == "__main__":
    unittest.main()
