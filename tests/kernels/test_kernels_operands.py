"""Machine code that writes to a product's operand before it has been read is told from code that does not."""

from tests.kernels.compiled.operands import overwritten

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR4], R24, gsb0"


def code(*lines: str) -> str:
    """As nvdisasm prints it."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * number:04x}*/                   {line} ;"
        for number, line in enumerate(lines)
    )


def loop(*body: str) -> str:
    return code("MOV R5, R6", ".L_x_0:", *body, "@P0 BRA `(.L_x_0)", "EXIT")


def test_a_write_at_the_next_turns_beginning_is_found():
    found = overwritten(loop("LDS.U16 R102, [R7]", "WARPGROUP.ARRIVE", PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1"))

    assert found == ["LDS.U16 R102, [R7]"]


def test_a_write_behind_the_wait_for_its_product_is_none():
    assert overwritten(loop("LDS.U16 R102, [R7]", PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x0")) == []


def test_a_wait_that_lets_as_many_go_on_as_came_after_the_product_ends_it():
    other = PRODUCT.replace("R100", "R104")

    assert overwritten(code(PRODUCT, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R100, R5")) == []
    assert overwritten(code(PRODUCT, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R104, R5")) == ["MOV R104, R5"]


def test_products_are_counted_in_groups():
    first, last = PRODUCT.replace(", gsb0", ""), PRODUCT.replace("R100", "R104")

    assert overwritten(code(first, last, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R100, R5")) == ["MOV R100, R5"]
    assert overwritten(code(first, last, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R100, R5")) == []


def test_a_write_of_several_registers_reaches_all_of_them():
    assert overwritten(code(PRODUCT, "LDS.128 R96, [R7]", "EXIT")) == []
    assert overwritten(code(PRODUCT, "LDS.128 R100, [R7]", "EXIT")) == ["LDS.128 R100, [R7]"]
    assert overwritten(code(PRODUCT, "LDG.E.64 R99, [R7]", "EXIT")) == ["LDG.E.64 R99, [R7]"]


def test_a_branch_round_the_wait_is_followed():
    way = (PRODUCT, "@P1 BRA `(.L_x_1)", "WARPGROUP.DEPBAR.LE gsb0, 0x0", ".L_x_1:", "MOV R101, R5", "EXIT")

    assert overwritten(code(*way)) == ["MOV R101, R5"]


def test_what_reads_or_writes_elsewhere_is_none():
    shared = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"

    assert overwritten(code(PRODUCT, "STS.128 [R100], R100", "IADD3 R5, P0, R100, R101, RZ", "EXIT")) == []
    assert overwritten(code(shared, "MOV R100, R5", "EXIT")) == []
