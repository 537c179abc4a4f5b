"""A strict HTML parser for tests of the pages that we write: mismatched end tags and repeated attributes fail."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Node:
    """An element: tag, attributes, children (nodes and strings)."""

    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    def all(self, tag=None, cls=None):
        """All descendants with this tag and class."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                fits = tag in (None, child.tag) and (cls is None or cls in child.attributes.get("class", "").split())
                found += [child] * fits + child.all(tag, cls)
        return found

    @property
    def text(self):
        """Text of all descendants, whitespace collapsed."""
        return " ".join(" ".join(c if isinstance(c, str) else c.text for c in self.children).split())


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open = [Node("", {})]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self.open[-1].children.append(Node(tag, attrs))
        if tag not in VOID:
            self.open.append(self.open[-1].children[-1])

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(text):
    """The tree of a whole page or a fragment; fails on tags that do not match."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    (root,) = parser.open
    return root
