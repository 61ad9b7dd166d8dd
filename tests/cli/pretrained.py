"""Loads weights with the classes that published them, by `from_pretrained`, and prints what they compute.

Reads JSON: `tokens`, and `cases` of a class and a folder each. A class is one of transformers, or `ColaForCausalLM` of the checkout
of the CoLA repository that NARROWS_COLA names. Prints JSON: for each case the keys that the class misses or does not know, its
logits in float64, and the tokens that it continues the text with, or why there is no such class.
"""

import json
import os
import sys
import warnings

NEW_TOKENS = 12

try:
    import torch
    import transformers
except ImportError as error:
    json.dump({"skipped": str(error)}, sys.stdout)
    sys.exit()


def class_of(name):
    if name == "ColaForCausalLM":
        sys.path.insert(0, os.environ["NARROWS_COLA"])
        from cola.modeling_cola import ColaForCausalLM

        return ColaForCausalLM
    return getattr(transformers, name)


def answer(name, folder, tokens):
    try:
        published = class_of(name)
    except (ImportError, AttributeError) as error:
        return {"skipped": f"transformers {transformers.__version__}: {error}"}
    model, loading = published.from_pretrained(folder, output_loading_info=True)
    model = model.double().eval()
    text = list(tokens)
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0]
        while len(text) < len(tokens) + NEW_TOKENS:
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    return {
        "problems": [str(key) for kind in kinds for key in loading[kind]],
        "logits": logits.flatten().tolist(),
        "continuation": text[len(tokens):],
    }


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    request = json.load(sys.stdin)
    json.dump({
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "answers": [answer(*case, request["tokens"]) for case in request["cases"]],
    }, sys.stdout)


main()
