"""Encodes texts with the tokenizers library of Hugging Face.

    encode_texts.py tokenizer.json < texts > tokens

Each line of texts is a JSON string. Each line of tokens is a JSON list of token ids.
"""
import json
import sys

from tokenizers import Tokenizer


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1])
    lines = sys.stdin.buffer.read().split(b"\n")[:-1]
    for at in range(0, len(lines), 10000):
        texts = [json.loads(line) for line in lines[at:at + 10000]]
        for encoding in tokenizer.encode_batch(texts):
            sys.stdout.write(json.dumps(encoding.ids) + "\n")


main()
