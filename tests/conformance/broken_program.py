"""A program that keeps the protocol until it is asked to dequantize, and then does what its argument says."""

import json
import os
import signal
import struct
import sys
import time


def say(fields: dict[str, object], blob: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(fields | {"bytes": len(blob)}).encode() + b"\n" + blob)
    sys.stdout.buffer.flush()


def tensor(name: str, word: str, shape: list[int], data: bytes) -> bytes:
    header = json.dumps({name: {"dtype": word, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def misbehave(how: str) -> None:
    match how:
        case "hang":
            time.sleep(600)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            print("no more memory on the device", file=sys.stderr)
            sys.exit(3)
        case "print":
            print("loading shaders", flush=True)
            say({}, tensor("weights", "F32", [1, 1], b"\0" * 4))
        case "name":
            say({}, tensor("w", "F32", [1, 1], b"\0" * 4))
        case "length":
            say({}, tensor("weights", "F32", [2, 2], b"\0" * 4))
        case "dtype":
            say({}, tensor("weights", "F99", [1, 1], b"\0" * 4))
        case "blob":
            say({}, b"\xff" * 20)
        case "bytes":
            sys.stdout.write('{"bytes":-1}\n')
            sys.stdout.flush()
        case "kind":
            say({"error": {"kind": "OopsError", "message": "oops"}})
        case "twice":
            say({"error": {"kind": "ShapeError", "message": "one"}})
            say({"error": {"kind": "ShapeError", "message": "two"}})


COUNTERS = dict.fromkeys(("bytes_read", "reads", "hits", "read_ahead", "on_demand", "drops"), 0)
STATES: dict[str, dict[str, object]] = {
    "resident": {"resident": [[1]], "counters": COUNTERS},
    "counters": {"resident": [], "counters": COUNTERS | {"hits": "3"}},
    "silence": {"resident": [], "counters": {"reads": 0, "hits": 0, "on_demand": 0, "drops": 0}},
    "less": {"resident": [], "counters": COUNTERS | {"reads": -1}},
}


def main(how: str) -> None:
    if how == "silent":
        time.sleep(600)
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        sys.stdin.buffer.read(request.get("bytes", 0))
        if request["operation"] == "hello":
            say({"protocol": 2 if how == "newer" else 1, "name": "broken", "claims": ["dequant", "router"]})
        elif request["operation"] == "dequantize":
            misbehave(how)
        elif how in STATES:
            say(STATES[how])
        else:
            say({"error": {"kind": "BackendError", "message": "not here"}})


if __name__ == "__main__":
    main(sys.argv[1])
