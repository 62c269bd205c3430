// A text that is corrected where it stands.

// Resolves to {text, step, left}: what is to stand there, `step` -1 or 1 where the next one is
// wanted, and whether something else was chosen meanwhile.
export function edit(element, label) {
  const original = element.textContent;
  element.contentEditable = "plaintext-only";
  element.setAttribute("role", "textbox");
  element.setAttribute("aria-label", label);
  element.focus();
  getSelection().selectAllChildren(element);
  return new Promise((resolve) => {
    const end = (step, { kept = true, left = false } = {}) => {
      element.onkeydown = element.onblur = null;
      for (const name of ["contenteditable", "role", "aria-label"]) element.removeAttribute(name);
      getSelection().removeAllRanges();
      const text = (kept ? element.textContent : original).trim().split(/\s+/).join(" ");
      element.textContent = original.match(/^\s*/)[0] + text;
      resolve({ text, step, left });
    };
    element.onblur = () => end(0, { left: true });
    element.onkeydown = (event) => {
      event.stopPropagation(); // its keys are not those of the text around it
      if (event.isComposing) return;
      if (event.key === "Enter") end(0);
      else if (event.key === "Escape") end(0, { kept: false });
      else if (event.key === "Tab") end(event.shiftKey ? -1 : 1);
      else return;
      event.preventDefault();
    };
  });
}
