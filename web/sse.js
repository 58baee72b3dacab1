// Server-sent events from a fetch() response. EventSource cannot POST.

// Splits a stream of text pieces into the data of events, wherever the pieces were cut. Lines end in LF, CRLF or CR;
// comment lines (": ping") and other fields are ignored.
export class EventParser {
  #line = "";
  #data = [];
  #sawReturn = false;

  // The data strings that this piece completes.
  push(piece) {
    const events = [];
    for (const part of piece.split(/(\r\n|\n|\r)/)) {
      if (part !== "\n" && part !== "\r" && part !== "\r\n") {
        if (part !== "") this.#sawReturn = false;
        this.#line += part;
        continue;
      }
      const secondHalf = this.#sawReturn && part === "\n" && this.#line === "";
      this.#sawReturn = part === "\r";
      if (!secondHalf) this.#endLine(events);
    }
    return events;
  }

  #endLine(events) {
    const line = this.#line;
    this.#line = "";
    if (line === "") {
      if (this.#data.length > 0) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

// The data of each event of a response, in order.
export async function* readEvents(response) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const {done, value} = await reader.read();
      yield* parser.push(done ? decoder.decode() : decoder.decode(value, {stream: true}));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
