() => {
  // Unfolds everything, and names elements beyond the page and texts of charts that overlap.
  for (const closed of document.querySelectorAll("details")) closed.open = true;
  const seen = box => box.width > 0 && box.height > 0;
  const name = element => element.textContent.trim();
  const found = {beyond: [], overlaps: [], small: [], texts: 0};
  for (const element of document.querySelectorAll("main *")) {
    const box = element.getBoundingClientRect();
    if (!element.closest(".scroll") && seen(box) && box.right > innerWidth + 1)
      found.beyond.push(`${element.tagName} ${name(element).slice(0, 40)}`);
  }
  for (const chart of document.querySelectorAll(".charts > *")) {
    const texts = [...chart.querySelectorAll("span, small, h4, p")].filter(
      text => !text.children.length && name(text) && seen(text.getBoundingClientRect()));
    const boxes = texts.map(text => text.getBoundingClientRect());
    found.texts += texts.length;
    boxes.forEach((a, i) => {
      if (a.height < 9) found.small.push(name(texts[i]));
      boxes.slice(i + 1).forEach((b, j) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3)
          found.overlaps.push(`${name(texts[i])} | ${name(texts[i + 1 + j])}`);
      });
    });
  }
  found.width = document.documentElement.scrollWidth - innerWidth;
  return found;
}
