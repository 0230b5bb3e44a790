"""What is asked of the live page, in its own language; and what is kept for who wants to look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chromium import NOT_FOUND, Page, find_chromium

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=NOT_FOUND)

ROWS = "document.querySelectorAll('#decisions tbody tr:not(.detail)').length"
LIVE = "document.getElementById('status')?.dataset.state === 'live'"
# Contrast of every text that can be seen, by WCAG 2.2's formula; those below its minimum.
POOR_CONTRAST = """
(() => {
  const pencil = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    pencil.clearRect(0, 0, 1, 1); pencil.fillStyle = color; pencil.fillRect(0, 0, 1, 1);
    return [...pencil.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], under) =>
    [r, g, b].map((c, i) => c * a / 255 + under[i] * (1 - a / 255)).concat(255);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 255]);
  };
  const luminance = (color) => color.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const text = node.data.trim().slice(0, 40);
    if (!text || !element.checkVisibility() || element.closest('.skip, option, script, style')) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), ground);
    const [light, dark] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < (isLarge ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} ${element.className} "${text}"`);
  }
  return [...found];
})()
"""
# What sticks out of the page sideways, or out of its own box without a way to scroll to it.
STICKING_OUT = """
(() => [...document.querySelectorAll('main *, header *')]
  .filter((e) => e.checkVisibility() && !e.closest('.scroll, svg, option, .run, .cards > thead'))
  .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`))()
"""


def keep(page: Page, name: str) -> None:
    """A screenshot for who wants to look."""
    if folder := os.environ.get("WARMPATH_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(Path(folder) / f"{name}.png")
