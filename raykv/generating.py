"""The pool's engine side: prompts in, outputs out."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from raykv.config import PoolConfig
from raykv.core.namespace import DEFAULT, Namespace
from raykv.core.retention import DEFAULT_RETENTION, Retention
from raykv.engine.build import load_tokenizer
from raykv.engine.params import GenerationRequest, SamplingParams, TokenDelta, TokenOutput
from raykv.errors import NotSupportedError
from raykv.generation import Batch, Generations, Listener, collect
from raykv.prompts import Prompts, requests_of, token_rows


class GeneratingRanks:
    """What a pool does with its ranks' engines; a part of BlockManagerPool.

    Attributes:
        config: what the ranks were made from.
        generations: requests of this driver that are under way.
    """

    config: PoolConfig
    generations: Generations
    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer.

        Raises:
            NotSupportedError: the pool has no model, or its model no tokenizer.
        """
        if self.config.model is None:
            raise NotSupportedError("the pool has no model, so no tokenizer: pass token ids")
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config.model.path)
        if self._tokenizer is None:
            raise NotSupportedError(
                f"model {self.config.model.path} has no tokenizer: pass token ids"
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        dp_rank: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
    ) -> list[TokenOutput]:
        """Continue prompts; the outputs come in order, ``params.n`` per prompt.

        Args:
            prompts: one or several, as text or token ids.
            params: how to continue them.
            request_id: a name to ``abort`` by; prompt i of several is ``request_id/i``.
            namespace: with whom their KV may be shared.
            dp_rank: the rank to use, such as the one that served the last turn of a conversation
                (``TokenOutput.dp_rank``) and holds its KV; None lets the pool choose.
            retention: how dearly their cached blocks are kept.

        Raises:
            RequestError: a prompt is empty, too long or holds unknown tokens; none was started.
            RankUnavailableError: a rank went away.
        """
        requests = self.make_requests(prompts, params, request_id, namespace, retention)
        deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        batch = Batch(requests, [deltas.put] * len(requests), dp_rank)
        self.generations.start(batch)
        try:
            outputs = collect(deltas, len(requests))
        except BaseException:
            self.generations.abandon(batch)
            raise
        return self.with_text(prompts, [outputs[request.request_id] for request in requests])

    def with_text(self, prompts: Prompts, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """The outputs with their text, if the prompts came as text."""
        first = prompts if isinstance(prompts, str | Mapping) else next(iter(prompts), None)
        if not isinstance(first, str):
            return outputs
        decode = self.tokenizer.decode
        return [
            replace(output, text=decode(output.token_ids, skip_special_tokens=True))
            for output in outputs
        ]

    def abort(self, request_id: str) -> None:
        """End a request that is under way; its output says ``abort``. Unknown ids are passed by."""
        self.generations.abort(request_id)

    def make_requests(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        namespace: Namespace = DEFAULT,
        retention: Retention = DEFAULT_RETENTION,
    ) -> list[GenerationRequest]:
        """Turn prompts into requests: one per prompt and sample."""
        name = self.generations.new_id() if request_id is None else request_id
        rows = token_rows(
            prompts, lambda text: self.tokenizer.encode(text, add_special_tokens=False)
        )
        return requests_of(rows, params, name, namespace, retention)

    def start(
        self,
        requests: SequenceOf[GenerationRequest],
        listeners: SequenceOf[Listener],
        dp_rank: int | None = None,
    ) -> None:
        """Submit requests and return; each listener hears of its own, on a thread of the pool."""
        self.generations.start(Batch(requests, listeners, dp_rank))
