"""A timeline as a picture: one SVG that needs nothing beside it, and no legend."""

from __future__ import annotations

from collections import Counter
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from client.installed.chart import Row, clock, span, summary, ticks
from client.installed.lives import Life, last_moment
from client.output import cut, escape
from client.types import Sequence

WIDTH, MARGIN, INDENT = 1200, 24, 16
TOP, STEP, BAR = 104, 26, 14  # where the rows begin; their distance; the height of a bar
CHAR = 7.0  # the width of a character of 12 pixels, on average
LABEL = (110, 300)  # least and largest width of the names
FATES = (150, 380)  # the same of the texts at the ends, at the right
TICKS = 8
INK, QUIET, GRID = "#1f2430", "#6b7280", "#e5e7eb"
GREEN, AMBER, RED, GREY, PALE = "#2f9e5b", "#e0a100", "#c8322b", "#8a93a3", "#97cfae"
COLOURS = {"done": GREEN, "error": RED, "interrupted": RED, "cancelled": GREY}
#: the colour and the height of a status; those of no height are lines
STATUSES = {
    "busy": (GREEN, BAR), "paused": (AMBER, BAR), "stopping": (RED, 6), "starting": (PALE, 6),
    "idle": (GREEN, 2), "ready": (GREEN, 2), "new": (GREY, 2),
}  # fmt: skip


#: the head of arrows, and the hatching of what is paused
DEFINITIONS = f"""<defs>\
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{RED}" /></marker>\
<pattern id="paused" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><rect width="6" height="6" fill="#fbeecb" />\
<rect width="2" height="6" fill="{AMBER}" /></pattern></defs>"""


def add(parent: Element, tag: str, **attributes: float | str) -> Element:
    """Add an element; of fractions one digit is written."""
    return SubElement(parent, tag, {
        key.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
        for key, value in attributes.items()
    })  # fmt: skip


class Picture:
    """An SVG under construction; `x` is where a moment is."""

    def __init__(self, top: Life, rows: Sequence[Row]) -> None:
        self.top = top
        self.rows = rows
        self.end = last_moment(top)
        self.names = [cut(escape(row.label), 44) for row in rows]
        self.fates = [cut(escape(row.fate), 60) for row in rows]
        self.actors = actors_of(rows)
        labels = [
            len(name) * CHAR + INDENT * depth(row)
            for name, row in zip(self.names, rows, strict=True)
        ]
        labels += [len(actor) * CHAR for actor in self.actors]
        self.left = MARGIN + 14 + max(LABEL[0], min(LABEL[1], max(labels)))
        fates = max(len(fate) * CHAR for fate in self.fates)
        self.right = WIDTH - MARGIN - 14 - max(FATES[0], min(FATES[1], fates + 6))
        self.scale = (self.right - self.left) / max(self.end - top.made, 1e-3)
        self.height = TOP + STEP * (len(rows) + len(self.actors)) + 28
        self.svg = Element("svg", {
            "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {self.height}",
            "width": str(WIDTH), "height": str(self.height), "role": "img",
            "font-family": "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif",
            "font-size": "12", "fill": INK,
        })  # fmt: skip
        self.heading, self.told = summary(top)
        SubElement(self.svg, "title").text = f"Timeline of {self.heading}"
        self.svg.append(fromstring(DEFINITIONS))
        add(self.svg, "rect", width="100%", height="100%", fill="#ffffff")
        #: from the back to the front
        self.back, self.bars, self.arrows, self.texts = (SubElement(self.svg, "g") for _ in "1234")
        self.texts.set("style", "paint-order:stroke;stroke:#fff;stroke-width:3")

    def x(self, when: float) -> float:
        """Return where a moment is."""
        return round(self.left + (when - self.top.made) * self.scale, 1)

    def y(self, place: int) -> int:
        """Return the middle of a line; those of actors come before those of rows."""
        return TOP + STEP * place + STEP // 2

    def text(self, at: tuple[float, float], text: str, **more: str) -> None:
        """Add a text in front of everything."""
        add(self.texts, "text", x=float(at[0]), y=float(at[1]), **more).text = text

    def line(self, group: Element, ends: tuple[float, float, float, float], **more: str) -> None:
        """Add a line from x, y to x, y."""
        x1, y1, x2, y2 = map(float, ends)
        add(group, "line", x1=x1, y1=y1, x2=x2, y2=y2, **more)

    def box(self, begin: float, end: float, y: float, height: int, fill: str) -> None:
        """Add a bar; of a short time at least a pixel is seen."""
        width = max(1.0, end - begin)
        add(self.bars, "rect", x=begin, y=y - height / 2, height=height, width=width, fill=fill)

    def draw(self) -> bytes:
        """Return the whole picture."""
        self.text((MARGIN, 34), self.heading, font_size="18", font_weight="bold")
        self.text((MARGIN, 54), self.told, fill=QUIET)
        self.axis()
        for place, actor in enumerate(self.actors):
            self.text((MARGIN, self.y(place) + 4), actor, font_style="italic")
            ends = (self.left, self.y(place), self.right, self.y(place))
            self.line(self.back, ends, stroke=QUIET, stroke_dasharray="1 4")
        for place, row in enumerate(self.rows):
            y = self.y(place + len(self.actors))
            self.label(row, y, self.names[place])
            if row.grouped:
                self.several(row, y)
            else:
                self.life(row.life, y)
            self.fate(row, y, self.fates[place])
        for place, row in enumerate(self.rows):
            self.enders(row, place)
        document: bytes = tostring(self.svg, encoding="utf-8", xml_declaration=True)
        return document + b"\n"

    def axis(self) -> None:
        """Add the times, and a faint line below each."""
        for tick in ticks(self.end - self.top.made, TICKS):
            x = self.x(self.top.made + tick)
            self.line(self.back, (x, TOP - 10, x, self.height - 24), stroke=GRID)
            told = f"+{span(tick)}" if tick else clock(self.top.made, "%H:%M:%S")
            look = {"fill": QUIET, "text_anchor": "middle", "font_size": "11"}
            self.text((x, TOP - 16), told, **look)

    def label(self, row: Row, y: float, name: str) -> None:
        """Add the name of a row, and the branch to that of its parent."""
        x = MARGIN + INDENT * depth(row)
        self.text((x, y + 4), name, font_weight="normal" if row.above else "bold")
        if row.above is not None:
            above = self.y(self.rows.index(row.above) + len(self.actors))
            path = f"M{x - 11} {above + 8} V{y} H{x - 3}"
            add(self.back, "path", d=path, fill="none", stroke="#b6bcc8")

    def life(self, life: Life, y: float) -> None:
        """Add the statuses of one life, named where there is room."""
        named = set()  # statuses that are lines
        for each in life.spans:
            if each.status not in STATUSES:
                continue
            fill, height = (RED, 2) if each.after else STATUSES[each.status]
            begin, end = self.x(each.begin), self.x(self.end if each.end is None else each.end)
            self.box(begin, end, y, height, "url(#paused)" if each.status == "paused" else fill)
            if height > BAR / 2 and end > begin:  # neighbours are told apart
                self.box(begin, begin + 1, y, height, "#ffffff")
            told = f"{each.status} {each.run}".strip()
            if each.after:
                told = f"{each.after}, waits to start again"
            if height == BAR and end - begin > len(told) * CHAR + 8:
                colour = INK if each.status == "paused" else "#ffffff"
                self.inside((begin + 6, y + 4), told, colour)
            elif (each.after or each.status) not in named and end - begin > len(told) * CHAR + 8:
                named.add(each.after or each.status)
                self.text((begin + 6, y - 5), told, fill=QUIET, font_size="10")

    def inside(self, at: tuple[float, float], text: str, colour: str) -> None:
        """Add a text on a bar."""
        x, y = map(float, at)
        add(self.bars, "text", x=x, y=y, fill=colour, font_size="11").text = text

    def several(self, row: Row, y: float) -> None:
        """Add how many of several lives there were at each time, as a hill."""
        changes = Counter(self.x(life.made) for life in row.lives)
        changes.subtract(self.x(life.end) for life in row.lives if life.end is not None)
        number, steps = 0, []
        for x in sorted(changes):
            steps += [(x, number), (x, number + changes[x])]
            number += changes[x]
        steps.append((self.x(self.end), number))
        most = max(count for _, count in steps)
        height = STEP - 8
        base = y + height / 2
        hill = " ".join(f"L{x:.1f} {base - height * count / most:.1f}" for x, count in steps)
        path = f"M{steps[0][0]:.1f} {base:.1f} {hill} L{steps[-1][0]:.1f} {base:.1f} z"
        add(self.bars, "path", d=path, fill=GREEN, fill_opacity="0.55")
        told = f"up to {most} at once"
        if self.x(max(life.end or self.end for life in row.lives)) - steps[0][0] > 130:
            self.text((steps[0][0] + 6, y + 5), told, font_size="10")

    def fate(self, row: Row, y: float, text: str) -> None:
        """Add a mark at the end of a row, and how it ended."""
        ends = [life.end for life in row.lives]
        end = max((end for end in ends if end is not None), default=self.end)
        x = self.x(self.end if None in ends else end)
        outcomes = {life.outcome for life in row.lives}
        outcome = outcomes.pop() if len(outcomes) == 1 else ""
        shapes = {
            "done": "M-5 0 L-1 4 L6 -5",
            "error": "M-5 -5 L5 5 M-5 5 L5 -5",
            "interrupted": "M-5 -5 L5 5 M-5 5 L5 -5",
            "cancelled": "M-3 -3 H3 V3 H-3 z M-3 0 H3",
        }
        if None in ends:
            add(self.texts, "path", d=f"M{x + 3:.1f} {y - 5} l8 5 l-8 5 z", fill=QUIET)
        elif outcome in shapes:
            style, place = f"stroke:{COLOURS[outcome]};stroke-width:3", f"{x + 9:.1f} {y}"
            mark = {"d": shapes[outcome], "transform": f"translate({place})", "fill": "none"}
            add(self.texts, "path", **mark, style=style)
        at = x + (6 if len(outcomes) else 20)
        colour = RED if outcome in ("error", "interrupted") else INK
        self.text((at, y + 4), cut(text, int((WIDTH - MARGIN - at) / CHAR)), fill=colour)

    def enders(self, row: Row, place: int) -> None:
        """Add arrows from who ended the lives of a row to where they ended."""
        by_ender: dict[str, float] = {}
        for life in row.lives:
            if life.ender and life.end is not None:
                when = life.end if life.stopped is None else life.stopped
                by_ender[life.ender] = max(when, by_ender.get(life.ender, 0.0))
        for ender, when in by_ender.items():
            source = self.source(row, ender)
            if source is None:
                continue
            here = place + len(self.actors)
            x, down = self.x(when), 1 if source < here else -1
            add(self.arrows, "circle", cx=x, cy=self.y(source), r="3.5", fill=RED)
            if source < len(self.actors):
                self.text((x + 8, self.y(source) + 4), "stop", fill=RED, font_size="11")
            ends = (x, self.y(source) + down * 4, x, self.y(here) - down * (BAR / 2 + 1))
            self.line(self.arrows, ends, stroke=RED, stroke_width="1.5", marker_end="url(#head)")

    def source(self, row: Row, ender: str) -> int | None:
        """Return the line of who ended a row's lives; None if it is nobody or one of them."""
        if ender == "parent":
            return None if row.above is None else self.rows.index(row.above) + len(self.actors)
        if ender in self.actors:
            return self.actors.index(ender)
        name = ender.removeprefix("agent:")
        for place, other in enumerate(self.rows):
            if other is not row and name in (life.name for life in other.lives):
                return place + len(self.actors)
        return None


def depth(row: Row) -> int:
    """Return how many rows are above one."""
    return 0 if row.above is None else 1 + depth(row.above)


def actors_of(rows: Sequence[Row]) -> list[str]:
    """Return who ended lives and is none of them, in the order in which they did."""
    names = {f"agent:{life.name}" for row in rows for life in row.lives}
    ended = sorted((life.stopped or 0.0, life.ender) for row in rows for life in row.lives)
    return [*dict.fromkeys(who for _, who in ended if who not in ("", "parent", *names))]


def picture(top: Life, rows: Sequence[Row]) -> bytes:
    """Return the timeline of a family as an SVG document."""
    return Picture(top, rows).draw()
