"""Licences of base models: what is trained for a model is published under the model's own."""

LICENSES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-14B-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-7B-Instruct": "apache-2.0",
    "Qwen/Qwen3-1.7B": "apache-2.0",
    "Qwen/Qwen3-30B-A3B": "apache-2.0",
    "Qwen/Qwen3-4B": "apache-2.0",
    "Qwen/Qwen3-8B": "apache-2.0",
    "google/gemma-3-27b-it": "gemma",
    "google/gemma-3-4b-it": "gemma",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3.2",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3.2",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3.3",
    "microsoft/phi-4": "mit",
    "mistralai/Mistral-7B-Instruct-v0.3": "apache-2.0",
    "openai/gpt-oss-20b": "apache-2.0",
}
"""Hub id -> identifier of the licence on the Hub, as the model's card has it."""


def license_lines(license: str | None, base_model: str) -> str:
    """The lines of a card's metadata that name its licence.

    Args:
        license: An identifier that the Hub knows; None for the base model's licence.
        base_model: Hub id; without a slash, the name of a model that is not there.
    """
    if known := license or LICENSES.get(base_model):
        return f"license: {known}"
    link = f"\nlicense_link: https://huggingface.co/{base_model}" if "/" in base_model else ""
    return f"license: other\nlicense_name: license-of-the-base-model{link}"
