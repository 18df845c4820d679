"""Tokenizers of one token a character, with and without a chat template."""


class BareTokenizer:
    chat_template: str | None = None
    unk_token_id: int | None = None
    bos_token_id: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        chat_template: str | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        raise AssertionError("a tokenizer without a template was asked for a chat")


class ChatTokenizer(BareTokenizer):
    chat_template = "yes"

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        chat_template: str | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = [f"<{message['role']}>{message['content']}" for message in conversation]
        return "".join([chat_template or "", *turns, "<assistant>"])
