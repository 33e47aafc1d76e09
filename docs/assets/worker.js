// Browsers start no workers for pages that are opened from disk: there, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = new URL(url, location.href).href;
      scope.document.body.append(script);
      this.deliver = (data) => scope.dispatchEvent(new scope.MessageEvent("message", { data }));
    }

    postMessage(data) {
      this.loaded.then(() => this.deliver(data));
    }
  };
}
