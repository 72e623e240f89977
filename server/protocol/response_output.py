"""What a model's parts become in a Responses answer: output items, and the events that tell of them while they grow.

One item is open at a time. Its events, in order (an item of another kind, or the end, closes it):

| item             | begins with                           | grows with                    | ends with                |
|------------------|---------------------------------------|-------------------------------|--------------------------|
| message          | output_item.added, content_part.added | output_text.delta             | .done, content_part.done |
| reasoning        | the same                              | reasoning_text.delta          | the same                 |
| function_call    | output_item.added                     | function_call_arguments.delta | .done                    |
| custom_tool_call | output_item.added                     | custom_tool_call_input.delta  | .done                    |

and then output_item.done. The source is OpenAI's description of the streaming events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from server.parsers.base import CallArguments, CallBegin, Content, Part, Reasoning
from server.protocol.response_items import Item, new_id, seal
from server.protocol.response_tools import Origin, Tools

Status = Literal["in_progress", "completed", "incomplete"]


class Events:
    """Renders events and numbers them."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        number = self._number()
        body = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def delta(self, head: bytes, text: str) -> bytes:
        """One more delta of the event that begins with `head` (of `delta_head`): the path that every token takes."""
        return b'%b"delta":%b,"sequence_number":%d}\n\n' % (head, orjson.dumps(text), self._number())

    def _number(self) -> int:
        number = self._next
        self._next += 1
        return number


def delta_head(kind: str, **fields: Any) -> bytes:
    """Everything of a delta event that does not change from one to the next."""
    return b"event: %b\ndata: %b," % (kind.encode(), orjson.dumps({"type": kind, **fields})[:-1])


class OpenItem(ABC):
    """An item that grows. `begin`, `grow` and `end` give its events; `end` also its final form, `self.final`."""

    prefix: str  # of its id
    _head: bytes  # of its deltas

    def __init__(self, events: Events, output_index: int) -> None:
        self.final: Item = {}
        self._events = events
        self.id = new_id(self.prefix)
        self._at = {"item_id": self.id, "output_index": output_index}
        self._texts: list[str] = []

    def begin(self) -> bytes:
        index = self._at["output_index"]
        return self._events("response.output_item.added", output_index=index, item=self._item("in_progress", ""))

    def grow(self, text: str) -> bytes:
        self._texts.append(text)
        return self._events.delta(self._head, text)

    def end(self, status: Status) -> bytes:
        text = "".join(self._texts)
        self.final = self._item(status, text)
        done = self._done(text)
        return done + self._events(
            "response.output_item.done", output_index=self._at["output_index"], item=self.final
        )  # fmt: skip

    def so_far(self, status: Status) -> Item:
        """The item as it is, called `status`."""
        return self._item("incomplete", "".join(self._texts)) | {"status": status}

    @abstractmethod
    def _item(self, status: Status, text: str) -> Item:
        """The item when its text is `text`."""

    @abstractmethod
    def _done(self, text: str) -> bytes:
        """The events before output_item.done."""


class OpenText(OpenItem):
    """A message or the thinking: an item with one part of text."""

    part_kind: str
    event_kind: str  # "response.output_text"

    def __init__(self, events: Events, output_index: int) -> None:
        super().__init__(events, output_index)
        self._at["content_index"] = 0
        self._head = delta_head(f"{self.event_kind}.delta", **self._at, **self._extra())

    def begin(self) -> bytes:
        return super().begin() + self._events("response.content_part.added", **self._at, part=self._part(""))

    def _done(self, text: str) -> bytes:
        done = self._events(f"{self.event_kind}.done", **self._at, text=text, **self._extra())
        return done + self._events("response.content_part.done", **self._at, part=self._part(text))

    def _extra(self) -> dict[str, Any]:
        """Further fields of the text's events."""
        return {}

    def _part(self, text: str) -> Item:
        return {"type": self.part_kind, "text": text}


class OpenMessage(OpenText):
    prefix = "msg_"
    part_kind = "output_text"
    event_kind = "response.output_text"

    def __init__(self, events: Events, output_index: int) -> None:
        self._logprobs: list[dict[str, Any]] = []
        super().__init__(events, output_index)

    def grow_with(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """logprobs: chat's entries of the tokens behind `text`."""
        if not logprobs:
            return self.grow(text)
        self._texts.append(text)
        self._logprobs += logprobs
        return self._events("response.output_text.delta", **self._at, delta=text, logprobs=logprobs)

    def _extra(self) -> dict[str, Any]:
        return {"logprobs": self._logprobs}

    def _part(self, text: str) -> Item:
        logprobs = self._logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: Status, text: str) -> Item:
        content = [] if status == "in_progress" else [self._part(text)]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class OpenReasoning(OpenText):
    """sealed: the item carries `encrypted_content` too, for clients that keep only that."""

    prefix = "rs_"
    part_kind = "reasoning_text"
    event_kind = "response.reasoning_text"

    def __init__(self, events: Events, output_index: int, *, sealed: bool) -> None:
        super().__init__(events, output_index)
        self._sealed = sealed

    def _item(self, status: Status, text: str) -> Item:
        content = [] if status == "in_progress" else [self._part(text)]
        sealed = seal(text) if self._sealed and status != "in_progress" else None
        return {
            "id": self.id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": sealed,
            "status": status,
        }  # fmt: skip


class OpenCall(OpenItem):
    """A function's call; its text is the arguments."""

    prefix = "fc_"
    delta_kind = "response.function_call_arguments.delta"

    def __init__(self, events: Events, output_index: int, call_id: str, origin: Origin) -> None:
        super().__init__(events, output_index)
        self._head = delta_head(self.delta_kind, **self._at)
        self._call: Item = {"call_id": call_id, "name": origin.name}
        if origin.namespace is not None:
            self._call["namespace"] = origin.namespace

    def end(self, status: Status) -> bytes:
        missing = b"" if self._texts or status != "completed" else self.grow("{}")
        return missing + super().end(status)

    def _item(self, status: Status, text: str) -> Item:
        return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": text}

    def _done(self, text: str) -> bytes:
        name = self._call["name"]
        return self._events("response.function_call_arguments.done", **self._at, name=name, arguments=text)


class OpenCustomCall(OpenCall):
    """A custom tool's call; its text is the input."""

    prefix = "ctc_"
    delta_kind = "response.custom_tool_call_input.delta"

    def end(self, status: Status) -> bytes:
        return OpenItem.end(self, status)  # an input may be empty

    def _item(self, status: Status, text: str) -> Item:
        return {"id": self.id, "type": "custom_tool_call", "status": status, **self._call, "input": text}

    def _done(self, text: str) -> bytes:
        return self._events("response.custom_tool_call_input.done", **self._at, input=text)


class Output:
    """The items of one answer: those that are closed are in `items`, in order."""

    def __init__(self, tools: Tools, events: Events, *, sealed: bool) -> None:
        self.items: list[Item] = []
        self._tools = tools
        self._events = events
        self._sealed = sealed
        self._open: OpenItem | None = None
        self._blank = ""  # a message that so far is blank: before a call it would be an item of nothing
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet

    def feed(self, parts: Sequence[Part], logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """The events of these parts. logprobs: of the tokens since the last call; those behind a message's text are
        told with it, the others are not."""
        self._logprobs += logprobs
        return b"".join([self._part(part) for part in parts])

    def end(self, *, cut: bool) -> bytes:
        """The model is done, or was cut by the limit: closes the open item. Who reads the answer may count on a
        message or a call, unless the thinking was cut."""
        tail = b""
        if not self._spoke and (self._blank or not cut):
            tail = self._say(self._blank)
        return tail + self._close("incomplete" if cut else "completed")

    def so_far(self, status: Status) -> list[Item]:
        """The items while they grow, perhaps in another thread. status: what the open one is called."""
        item, items = self._open, list(self.items)
        if item is not None and all(each["id"] != item.id for each in items):  # it may have been closed just now
            items.append(item.so_far(status))
        return items

    @property
    def _spoke(self) -> bool:
        """Whether there is an item other than thinking."""
        items = [item["type"] for item in self.items]
        return any(kind != "reasoning" for kind in items) or isinstance(self._open, (OpenMessage, OpenCall))

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._content(text)
            case Reasoning(text):
                self._logprobs.clear()
                if isinstance(self._open, OpenReasoning):
                    return self._open.grow(text)
                item = OpenReasoning(self._events, self._next_index(), sealed=self._sealed)
                return self._begin(item) + item.grow(text)
            case CallBegin(_, call_id, name):
                self._logprobs.clear()
                origin = self._tools.origin(name)
                kind = OpenCustomCall if origin.custom else OpenCall
                return self._begin(kind(self._events, self._next_index(), call_id, origin))
            case CallArguments(_, text):
                self._logprobs.clear()
                assert isinstance(self._open, OpenCall)
                return self._open.grow(text)

    def _content(self, text: str) -> bytes:
        if isinstance(self._open, OpenMessage) or (self._blank + text).strip():
            return self._say(self._blank + text)
        self._blank += text
        return b""

    def _say(self, text: str) -> bytes:
        begun = b""
        self._blank = ""
        if not isinstance(self._open, OpenMessage):
            begun = self._begin(OpenMessage(self._events, self._next_index()))
        assert isinstance(self._open, OpenMessage)
        logprobs, self._logprobs = self._logprobs, []
        return begun + (self._open.grow_with(text, logprobs) if text or logprobs else b"")

    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: OpenItem) -> bytes:
        closed = self._close("completed")
        self._open, self._blank = item, ""
        return closed + item.begin()

    def _close(self, status: Status) -> bytes:
        if self._open is None:
            return b""
        events = self._open.end(status)
        self.items.append(self._open.final)
        self._open = None
        return events
