"""Small PDF files for tests."""


def pdf(*pages: str, encrypted: str = "") -> bytes:
    """A PDF file whose pages are drawn by these operators."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>"]
    objects.append("<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    for number, page in enumerate(pages):
        resources = "/Resources<</Font<</F 3 0 R>>>>/MediaBox[0 0 600 800]"
        objects += [f"<</Type/Page/Parent 2 0 R{resources}/Contents {5 + 2 * number} 0 R>>"]
        objects += [f"<</Length {len(page)}>>stream\n{page}\nendstream"]
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"trailer<</Size {size}/Root 1 0 R{encrypted}>>\nstartxref\n{len(body)}\n%%EOF"
    return f"{body}xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}".encode("latin-1")


def line(x: int, y: int, text: str, size: int = 10) -> str:
    return f"BT /F {size} Tf {x} {y} Td ({text}) Tj ET\n"
