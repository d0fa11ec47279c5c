"""Prompt compression: the backbone reads what is left of the passages' text when unimportant tokens are dropped.

Both methods are those of the package `llmlingua`, at a third of the tokens. LLMLingua-2 has a classifier of its own
for what to keep; LLMLingua keeps what a language model, here the backbone itself, finds surprising.
"""

from .answering import Row, passages_text, text_prompt
from .downloaded import downloaded
from .reading import MissingMethodError, Reader, TextReader, load_aligner

RATE = 1 / 3  # of the tokens are kept, as in the paper
LLMLINGUA2_MODEL = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
_INSTALL = "the package llmlingua is not installed; `pip install llmlingua==0.2.2` gets it"


def load_llmlingua(checkpoints) -> Reader:
    """LLMLingua; the aligner's backbone both scores the tokens and reads those that are kept."""
    try:
        from .backbone_compressor import BackboneCompressor
    except ModuleNotFoundError as error:
        raise MissingMethodError(_INSTALL) from error
    model, processor = load_aligner(checkpoints.aligner, checkpoints.device)
    compressor = BackboneCompressor(model, processor.tokenizer)
    return TextReader(
        model, processor, text_prompt, lambda rows: [compressor.compress(passages_text(row), RATE) for row in rows]
    )


def load_llmlingua2(checkpoints) -> Reader:
    """LLMLingua-2 with the classifier of its paper."""
    try:
        from llmlingua import PromptCompressor
        from requests import RequestException  # of tiktoken, which llmlingua needs
    except ModuleNotFoundError as error:
        raise MissingMethodError(_INSTALL) from error
    folder = downloaded(LLMLINGUA2_MODEL, "2.2 GB")
    try:
        compressor = PromptCompressor(
            folder, checkpoints.device, model_config={"trust_remote_code": False}, use_llmlingua2=True
        )
    except RequestException as error:
        raise MissingMethodError(
            "LLMLingua-2 counts tokens with OpenAI's tokenizer; once, with a network, "
            "`python -c \"import tiktoken; tiktoken.encoding_for_model('gpt-3.5-turbo')\"` gets it "
            "into $TIKTOKEN_CACHE_DIR"
        ) from error
    model, processor = load_aligner(checkpoints.aligner, checkpoints.device)
    return TextReader(model, processor, text_prompt, lambda rows: compressed_texts(compressor, rows))


def compressed_texts(compressor, rows: list[Row]) -> list[str]:
    """What LLMLingua-2 leaves of each row's passages."""
    texts = [passages_text(row) for row in rows]
    return compressor.compress_prompt_llmlingua2(texts, rate=RATE)["compressed_prompt_list"]
