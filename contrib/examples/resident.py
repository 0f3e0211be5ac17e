"""A resident agent: one process for all messages. It says each word back, and counts them all.

A message is a line of JSON on standard input, and so is each piece of a reply on standard
output; what is no such line is output like any other. See RUNS in ctxfs(5).
"""

import json
import os
import sys
import time

#: seconds for each word, as if one had to think
PACE = float(os.environ.get("PACE", "0"))


def say(kind: str, message: dict[str, str], text: str) -> None:
    print(json.dumps({"type": kind, "id": message["id"], "text": text}), flush=True)


total = 0
for line in sys.stdin:
    message = json.loads(line)
    words = message["text"].split()
    for word in words:
        time.sleep(PACE)
        say("delta", message, f"{word} ")
    total += len(words)
    if words:
        say("message", message, f"{len(words)} words, {total} in all")
    else:
        say("error", message, "there are no words in this message")
