"""A peer for tests: plain Python under the peers' protocol; `options` say how it behaves."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import subprocess
import sys
import time

from peer_protocol import Unsupported, serve


class Fake:
    how = "invented"

    def __init__(self, job: dict):
        self.options = job["options"]
        print("a library prints what it likes")
        os.system("echo and so does C code")
        match self.options.get("load"):
            case "absent":
                import no_such_package  # noqa: F401
            case "unsupported":
                raise Unsupported("it cannot")
            case "broken":
                raise ValueError(f"no model in {job['model']}/model.bin")
            case "dies":
                sys.stderr.write("out of luck\n")
                os.abort()
            case "waits":
                with open(self.options["note"], "w") as note:
                    note.write(str(os.getpid()))
                time.sleep(3600)
            case "hangs":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
                with open(self.options["note"], "w") as note:
                    note.write(str(child.pid))
                time.sleep(3600)

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        return {"prefill": self.options["logits"], "decode": self.options["logits"]}

    def generate(self, requests: list[dict]) -> list[list[float]]:
        if self.options.get("generate") == "broken":
            raise RuntimeError("lost its way")
        with open(self.options["note"], "a") as note:
            note.write(f"{self.options['name']} {requests[0]['prompt'][0]}\n")
        now, step = time.perf_counter(), self.options.get("step", 0.01)
        missing = self.options.get("generate") == "short"
        return [[now + step * (i + 1) for i in range(each["output_tokens"] - missing)] for each in requests]


if __name__ == "__main__":
    serve(Fake)
