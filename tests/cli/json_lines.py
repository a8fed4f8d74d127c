"""Files of JSON lines."""

import json


def write(path, *lines):
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
