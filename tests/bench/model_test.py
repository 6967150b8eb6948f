#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""model.py against measurements made up from known costs: it must find them again."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import model  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
TRUE = model.Model({"alltoall": [1 / 600e9, 1 / 4e9, 0.02], "flex": [1 / 650e9, 1 / 4e9, 0.01]},
                   {"alltoall": [0.05, 1 / 380e6, 1 / 900e6], "flex": [0.1, 1 / 380e6, 1 / 700e6]},
                   {"alltoall": [0.03, 0.004, 0.2, 1 / 2e9],
                    "flex": [0.09, 0.003, 0.3, 1 / 800e6]})


def report(ranks, tokens, truth=TRUE, noise=lambda i: 1.0, **more):
    """As ep-overlap bench --json prints, the times being the model's own."""
    run = {"schema": "ep-overlap-bench/1", "tokens": tokens, "hidden": 2048, "ffn": 768,
           "experts": 64 * ranks, "top_k": 8, "ranks": ranks, "type": "bf16",
           "ranks_share": False, "arms": []}
    run.update(more)
    for i, (dispatcher, chunks) in enumerate(
            (d, c) for d in ("alltoall", "flex") for c in (0, 2, 4, 8)):
        arm = {"dispatcher": dispatcher, "overlap": chunks > 0, "chunks": max(1, chunks),
               "delay_wgrad": False, "forward": {"ms": {"median": 1.0}},
               "ffn_alone_forward_ms": 1.0}
        p = model.Point(run, arm, "made up")
        arm["ffn_alone_forward_ms"] = truth.ffn_ms(p)
        arm["forward"]["ms"]["median"] = truth.predict(p) * noise(i)
        run["arms"].append(arm)
    return run


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, name, content):
        path = os.path.join(self.folder.name, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(content if isinstance(content, str) else json.dumps(content))
        return path

    def many(self, **more):
        return [self.write(f"{r}-{t}-{h}.json", report(r, t, hidden=h, **more))
                for r in (1, 2) for t in (256, 1024, 4096, 16384) for h in (1024, 2048)]

    def run_model(self, *args):
        return subprocess.run([sys.executable, os.path.join(HERE, "model.py"), *args],
                              capture_output=True, text=True, timeout=60, check=False)


class Fit(Files):
    def test_finds_what_made_the_times(self):
        found = model.fit(model.load(self.many()))
        for got, want in ((found.ffn["flex"], TRUE.ffn["flex"]), (found.serial["flex"], TRUE.serial["flex"]),
                          (found.serial["alltoall"], TRUE.serial["alltoall"]),
                          (found.overlapped["alltoall"], TRUE.overlapped["alltoall"]),
                          (found.overlapped["flex"], TRUE.overlapped["flex"])):
            for a, b in zip(got, want):
                self.assertAlmostEqual(a / b, 1.0, places=4)

    def test_predicts_what_it_was_not_given(self):
        found = model.fit(model.load(self.many()))
        for ranks in (4, 8):
            held = model.load([self.write("held.json", report(ranks, 3000))])
            self.assertLess(max(abs(e) for e, _ in model.errors(found, held)), 1e-4)

    def test_noise_comes_out_as_error(self):
        points = model.load(self.many(noise=lambda i: 1.1 if i % 2 else 0.9))
        size = sorted(abs(e) for e, _ in model.errors(model.fit(points), points))
        self.assertGreater(size[len(size) // 2], 0.02)

    def test_no_cost_is_below_zero(self):
        points = model.load(self.many(truth=model.Model(
            TRUE.ffn, {k: [0.0, v[1], 0.0] for k, v in TRUE.serial.items()},
            {k: [-0.01, 0.0, 0.1, 0.0] for k in TRUE.serial})))
        found = model.fit(points)
        for c in [*found.ffn.values(), *found.serial.values(), *found.overlapped.values()]:
            self.assertGreaterEqual(min(c), 0.0)


class Bytes(unittest.TestCase):
    def test_copies_are_those_of_theory(self):
        """The figures that the design was made by: E = 128, 8 experts a token."""
        for ranks, permuted, once in ((2, 4, 1.0), (4, 6, 2.7), (8, 7, 4.7)):
            self.assertEqual(model.copies("alltoall", 128, 8, ranks), permuted)
            self.assertAlmostEqual(model.copies("flex", 128, 8, ranks), once, delta=0.06)
        self.assertEqual(model.copies("flex", 128, 8, 1), 0)

    def test_first_chunks(self):
        self.assertAlmostEqual(model.first_share("flex", 128, 8, 2, 4), 0.67, delta=0.01)
        self.assertAlmostEqual(model.first_share("flex", 128, 8, 8, 8), 0.18, delta=0.02)
        self.assertAlmostEqual(model.first_share("alltoall", 128, 8, 2, 2), 0.5)
        self.assertAlmostEqual(model.first_share("alltoall", 128, 8, 2, 8), 1 / 14)
        self.assertEqual(model.first_share("alltoall", 128, 8, 2, 1), 1)


class Command(Files):
    def test_fit_then_paper(self):
        saved = os.path.join(self.folder.name, "saved.json")
        held = self.write("held.json", report(2, 2000))
        done = self.run_model("fit", "--save", saved, "--hold", held, *self.many())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("600 TFLOP/s", done.stdout)
        self.assertIn("wire at 380 GB/s", done.stdout)
        self.assertRegex(done.stdout, r"held out: 8 times, error 0\.0%")
        done = self.run_model("paper", "--workload", "d", saved)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 11)
        wire = [float(line.split("|")[5].split(",")[0]) for line in done.stdout.splitlines()[3:]]
        self.assertEqual(wire, sorted(wire))

    def test_paper_from_what_is_kept(self):
        done = self.run_model("paper", os.path.join(HERE, "model-h200.json"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\n\| 64 \| 128 \| 0\.5")

    def test_wrong_inputs_are_named(self):
        good = self.many()
        lacking = report(2, 64)
        del lacking["arms"][0]["chunks"]
        for content, says in (("{", "bad.json"), ("[1]", "not a report"), ({"schema": "x"}, "not"),
                              (lacking, "no field 'chunks'")):
            done = self.run_model("fit", *good, self.write("bad.json", content))
            self.assertEqual(done.returncode, 1)
            self.assertIn(says, done.stderr)
            self.assertIn("bad.json", done.stderr)
        done = self.run_model("fit", self.write("one.json", report(2, 64)))
        self.assertEqual(done.returncode, 1)
        self.assertIn("one rank and of several", done.stderr)
        self.assertEqual(self.run_model("paper", "/nowhere").returncode, 1)

    def test_shared_gpus_are_left_out(self):
        shared = self.write("shared.json", report(4, 64, ranks_share=True))
        self.assertEqual(model.load([shared]), [])


if __name__ == "__main__":
    unittest.main()
