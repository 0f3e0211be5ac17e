"""A resident agent: one process for all messages. It repeats each word, and counts all words.

Each message is a line of JSON on standard input, and each piece of a reply is a line of JSON on
standard output. Other lines are ordinary output. See RESIDENT PROGRAMS in ctxfs-programs(7).
"""

import json
import os
import sys
import time

#: seconds for each word, to imitate thinking
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
