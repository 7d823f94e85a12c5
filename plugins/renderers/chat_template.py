"""The model's own chat template, whatever the model."""

from __future__ import annotations

from posttrain.core.data.template import TemplateConfig, TemplateRenderer


class ChatTemplateRenderer(TemplateRenderer):
    """tokens = tokenizer(template(messages, tools)), with the text of messages kept plain.

    An assistant's turn reaches from the end of the generation prompt through the token that ends
    it, found by `{% generation %}` where the template has it, else by marks at the ends of
    contents, else by the renderings of the conversation's beginnings; what cannot be found for
    certain is refused. Source: own; `{% generation %}` is that of transformers.
    """

    name = "chat_template"
    Config = TemplateConfig
